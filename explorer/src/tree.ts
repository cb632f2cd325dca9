/** The rows of the list on the left: modules in the order of the tree, or in the order of their calls. */

import { suffixOf } from "./app";
import type { Module, Page, Site } from "./data";
import type { Found } from "./search";

/** One row: a module with its main value, or another value of the module above. */
export interface Row {
  key: string;
  module: Module;
  site: Site | null;
  label: string;
  level: number;
  children: number; // How many rows are directly below it in the tree.
  open: boolean;
  faded: boolean; // True if the row does not match the search, but a row below it does.
}

interface Branch {
  module: Module;
  branches: Branch[];
}

const MOST_AT_FIRST = 60;
const FEW_VALUES = 3;

export class Tree {
  private readonly root: Branch;
  private readonly all: Branch[] = [];
  private readonly open = new Set<string>();

  constructor(private readonly page: Page) {
    this.root = this.grow();
    this.openSome();
  }

  /** The rows to show. */
  rows(found: Found, order: "tree" | "calls"): Row[] {
    return order === "calls" ? this.byCalls(found) : this.byTree(found);
  }

  toggle(row: Row, open: boolean): void {
    const key = row.key.startsWith("values ") ? row.key : row.module.path;
    if (open) this.open.add(key);
    else this.open.delete(key);
  }

  /** Open or close every module. */
  toggleAll(open: boolean): void {
    for (const { module, branches } of this.all) {
      if (open && (branches.length || this.others(module).length)) this.open.add(module.path);
      else if (module.path !== "") this.open.delete(module.path);
    }
  }

  /** Open the modules above a module, so that it is visible; with `others`, its other values too. */
  reveal(path: string, others: boolean): void {
    this.open.add("");
    this.open.add(path);
    if (others) this.open.add(valuesKey(path));
    const names = path.split(".");
    for (let depth = 1; depth < names.length; depth += 1) this.open.add(names.slice(0, depth).join("."));
  }

  private grow(): Branch {
    const branches = new Map<string, Branch>();
    for (const module of this.page.modules) {
      const branch = { module, branches: [] };
      this.all.push(branch);
      branches.set(module.path, branch);
      if (module.path !== "") branches.get(parentOf(module.path))?.branches.push(branch);
    }
    return branches.get("") ?? { module: this.page.modules[0]!, branches: [] };
  }

  /** Open the upper levels at the start, as many as fit on a screen or two. */
  private openSome(): void {
    let level = [this.root];
    let shown = 1;
    while (level.length) {
      const next = level.flatMap((branch) => branch.branches);
      if (shown > 1 && shown + next.length > MOST_AT_FIRST) break;
      for (const branch of level) this.open.add(branch.module.path);
      shown += next.length;
      level = next;
    }
  }

  private byTree(found: Found): Row[] {
    const rows: Row[] = [];
    const filtered = found.how !== "all";
    const visit = (branch: Branch, level: number): boolean => {
      const at = rows.length;
      const others = this.others(branch.module).filter((site) => !filtered || found.sites.has(site.number));
      const main = mainSite(this.page, branch.module);
      const hit = !filtered || found.modules.has(branch.module.number) || (main !== null && this.isFound(found, main));
      rows.push({ ...rowOf(branch.module, main), level, children: 0, open: false, faded: !hit });
      const row = rows[at]!;
      row.children = others.length + branch.branches.length;
      row.open = row.children > 0 && (filtered || this.open.has(branch.module.path));
      let some = hit || others.length > 0;
      if (row.open) {
        rows.push(...this.valueRows(branch.module, others, level + 1, filtered));
        for (const below of branch.branches) if (visit(below, level + 1)) some = true;
      }
      if (filtered && rows.length === at + 1) [row.children, row.open] = [0, false];
      if (!some) rows.length = at;
      return some;
    };
    visit(this.root, 1);
    return rows;
  }

  /** The other values of a module: a few as rows, many behind one row. */
  private valueRows(module: Module, sites: Site[], level: number, filtered: boolean): Row[] {
    const rows = sites.map((site) => ({ ...siteRow(module, site), level }));
    if (filtered || sites.length <= FEW_VALUES) return rows;
    const key = valuesKey(module.path);
    const open = this.open.has(key);
    const group = { ...rowOf(module, null), key, label: `${sites.length} more values`, level, children: sites.length, open };
    return open ? [group, ...rows.map((row) => ({ ...row, level: level + 1 }))] : [group];
  }

  private byCalls(found: Found): Row[] {
    const late = Number.MAX_SAFE_INTEGER;
    const rows: { row: Row; order: number }[] = [];
    for (const { module } of this.all) {
      const main = mainSite(this.page, module);
      const order = module.order ?? main?.order ?? late;
      if (found.modules.has(module.number) || (main && this.isFound(found, main))) {
        rows.push({ row: { ...rowOf(module, main), label: module.path || "model" }, order });
      }
      for (const site of this.others(module)) {
        if (found.sites.has(site.number)) rows.push({ row: { ...siteRow(module, site), label: site.name }, order });
      }
    }
    return rows.toSorted((one, other) => one.order - other.order).map(({ row }) => row);
  }

  private isFound(found: Found, site: Site): boolean {
    return found.sites.has(site.number) || (site.gradient !== null && found.sites.has(site.gradient));
  }

  /** The values of a module besides the one in its own row; gradients are shown with the values they belong to. */
  private others(module: Module): Site[] {
    const main = mainSite(this.page, module);
    return module.sites.map((number) => this.page.sites[number]!).filter((site) => site !== main && site.value === null);
  }
}

/** The value in a module's own row: its output, or the first part of it. */
export function mainSite(page: Page, module: Module): Site | null {
  const sites = module.sites.map((number) => page.sites[number]!);
  const outputs = sites.filter((site) => site.port === "output" && !site.member && site.call === null);
  return outputs.find((site) => !site.index) ?? outputs[0] ?? null;
}

function rowOf(module: Module, site: Site | null): Row {
  const label = module.path === "" ? "model" : module.path.slice(module.path.lastIndexOf(".") + 1);
  return { key: `module ${module.path}`, module, site, label, level: 1, children: 0, open: false, faded: false };
}

function siteRow(module: Module, site: Site): Row {
  return { key: `site ${site.name}`, module, site, label: suffixOf(site) || site.name, level: 1, children: 0, open: false, faded: false };
}

/** The key of the row that opens the other values of a module. */
export function valuesKey(path: string): string {
  return `values ${path}`;
}

function parentOf(path: string): string {
  const dot = path.lastIndexOf(".");
  return dot < 0 ? "" : path.slice(0, dot);
}
