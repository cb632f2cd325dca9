/** The small box beside the cursor that shows the value there; screen readers read it aloud. */

import { element, replace, type Child } from "./elements";

const box = element("div", { class: "tip", hidden: true });
const spoken = element("div", { class: "unseen", "aria-live": "polite" });

/** Put the box into the page. */
export function placeTip(): void {
  document.body.append(box, spoken);
}

/** Show the box near a point of the window. */
export function showTip(x: number, y: number, ...children: Child[]): void {
  replace(box, ...children);
  box.hidden = false;
  const [width, height] = [box.offsetWidth, box.offsetHeight];
  const left = x + 16 + width > window.innerWidth - 8 ? x - width - 12 : x + 16;
  const top = y + 18 + height > window.innerHeight - 8 ? y - height - 12 : y + 18;
  box.style.setProperty("left", `${Math.max(4, left)}px`);
  box.style.setProperty("top", `${Math.max(4, top)}px`);
  spoken.textContent = [...box.children].map((child) => child.textContent).join(", ");
}

export function hideTip(): void {
  box.hidden = true;
}
