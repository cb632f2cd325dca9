// Builds the page: bundles src/main.ts and style.css into index.html (without type checks), and writes src/hookline/_explore/explorer.html.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "..", "src", "hookline", "_explore", "explorer.html");

/** A hash of all sources of the page; tests/explore/test_explore_built.py computes the same hash without Node. */
function hashOfSources() {
  const own = ["build.mjs", "index.html", "package-lock.json", "package.json", "style.css", "tsconfig.json"];
  const files = [...own, ...readdirSync(join(here, "src")).map((name) => `src/${name}`)].sort();
  const hash = createHash("sha256");
  for (const file of files) hash.update(`${file}\0`).update(readFileSync(join(here, file))).update("\0");
  return hash.digest("hex");
}

async function bundle(entry) {
  const made = await build({
    entryPoints: [join(here, entry)],
    bundle: true,
    write: false,
    minify: true,
    format: "iife",
    target: ["es2023", "chrome120", "firefox121", "safari17.4"],
    charset: "utf8",
    legalComments: "none",
  });
  return made.outputFiles[0].text.trim();
}

const cspHash = (text) => `sha256-${createHash("sha256").update(text).digest("base64")}`;
const [script, style] = [await bundle("src/main.ts"), await bundle("style.css")];
const parts = { script, style, sources: hashOfSources(), "script-hash": cspHash(script), "style-hash": cspHash(style) };
const form = readFileSync(join(here, "index.html"), "utf8");
const page = form.replace(/\{\{([a-z-]+)\}\}/g, (_, name) => parts[name]);
writeFileSync(target, page);
console.log(`${target}: ${Math.round(page.length / 1024)} kB`);
