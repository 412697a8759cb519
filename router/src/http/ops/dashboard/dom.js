// Nodes and figures. Names of workers and models, and what models say, are data of strangers: they become text nodes only.

export const byId = (id) => document.getElementById(id);

export function element(tag, options = {}, children = []) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Touches the page only where something changed: most of a fleet stands still from second to second.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

// A bar of parts, each a share of the whole. Widths go through the object model, which the page's policy allows.
export class Bar {
  constructor(kinds, label) {
    this.parts = kinds.map((kind) => element("i", { class: kind }));
    this.node = element("div", { class: "bar", role: "img", "aria-label": label }, this.parts);
    this.label = label;
  }

  show(shares, words) {
    shares.forEach((share, i) => {
      const width = `${(100 * Math.min(Math.max(share || 0, 0), 1)).toFixed(1)}%`;
      if (this.parts[i].style.width !== width) this.parts[i].style.width = width;
    });
    const label = `${this.label}: ${words}`;
    if (this.node.title !== words) {
      this.node.title = words;
      this.node.setAttribute("aria-label", label);
    }
  }
}

// Keeps a node for each name, in the order of the list.
export class Shelf {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.held = new Map();
  }

  show(list, nameOf, ...more) {
    const names = new Set(list.map(nameOf));
    for (const [name, tile] of this.held) {
      if (!names.has(name)) {
        tile.node.remove();
        this.held.delete(name);
      }
    }
    list.forEach((one, i) => {
      const name = nameOf(one);
      if (!this.held.has(name)) this.held.set(name, this.make(one));
      const tile = this.held.get(name);
      tile.show(one, ...more);
      if (this.parent.children[i] !== tile.node) this.parent.insertBefore(tile.node, this.parent.children[i] || null);
    });
  }
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

// Three figures, as far as there are any; a dash where nothing is known.
export function figure(value) {
  if (!known(value)) return "–";
  const digits = value !== 0 && Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");

export const percent = (share) => (known(share) ? `${(100 * share).toFixed(share < 0.9995 ? 1 : 0)} %` : "–");

export function time(ms) {
  if (!known(ms)) return ["–", ""];
  return ms < 1000 ? [figure(ms), "ms"] : [figure(ms / 1000), "s"];
}

export function age(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 100) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

// A long name with its middle left out; all of it stands in the title.
export function shortened(name, most = 22) {
  return name.length <= most ? name : `${name.slice(0, most - 9)}…${name.slice(-8)}`;
}
