// A card with a large figure and its last five minutes as a line, or several lines on one scale.

import { element, figure, setText } from "./dom.js";

const POINTS = 300; // one a second
const WIDTH = 300;
const HEIGHT = 72;

export class Chart {
  // `names` of its lines, the first of which is drawn strongest; `most` is the top of a fixed scale.
  constructor(card, names, unit, most = null) {
    this.names = names;
    this.unit = unit;
    this.most = most;
    this.points = [];
    this.value = element("strong", { text: "–" });
    this.unitNode = element("span", { text: unit });
    this.aside = element("span", { class: "aside" });
    card.append(element("p", { class: "figure" }, [this.value, this.unitNode, this.aside]));
    const chart = document.getElementById("chart").content.cloneNode(true);
    this.lines = [".first", ".second", ".third"].map((kind) => chart.querySelector(kind));
    this.area = chart.querySelector(".area");
    this.cursor = chart.querySelector(".cursor");
    this.scale = chart.querySelector(".scale");
    this.readout = chart.querySelector(".readout");
    const svg = chart.querySelector("svg");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      this.at = Math.round(((event.clientX - box.left) / box.width) * (POINTS - 1));
      this.point();
    });
    svg.addEventListener("pointerleave", () => {
      this.at = null;
      this.point();
    });
    card.append(chart);
  }

  // Adds a second: a number or null for each line.
  add(values, shown, unit, aside) {
    this.points.push(values);
    if (this.points.length > POINTS) this.points.shift();
    setText(this.value, shown);
    setText(this.unitNode, unit);
    setText(this.aside, aside);
    this.draw();
  }

  draw() {
    const all = this.points.flat().filter((value) => value !== null);
    const top = this.most ?? nice(Math.max(0, ...all));
    const offset = POINTS - this.points.length;
    this.lines.forEach((line, i) => {
      if (i >= this.names.length) return;
      line.setAttribute("d", path(this.points.map((values) => values[i]), offset, top));
    });
    const first = path(this.points.map((values) => values[0] ?? 0), offset, top);
    const end = `L${WIDTH} ${HEIGHT}L${x(offset)} ${HEIGHT}Z`;
    this.area.setAttribute("d", this.names.length === 1 && first ? first + end : "");
    setText(this.scale, `${figure(top * (this.unit === "%" ? 100 : 1))} ${this.unit}`);
    this.point();
  }

  // What the pointer is at, or the names of the lines.
  point() {
    const values = this.at == null ? null : this.points[this.at - (POINTS - this.points.length)];
    this.cursor.setAttribute("d", values ? `M${x(this.at)} 0V${HEIGHT}` : "");
    if (!values) {
      setText(this.readout, this.names.length > 1 ? this.names.join(" · ") : "5 min");
      return;
    }
    const factor = this.unit === "%" ? 100 : 1;
    const told = values.map((value) => figure(value === null ? null : value * factor)).join(" · ");
    setText(this.readout, `${told} ${this.unit}, ${POINTS - 1 - this.at} s ago`);
  }
}

const x = (i) => ((i * WIDTH) / (POINTS - 1)).toFixed(1);

// A line with gaps where nothing is known.
function path(values, offset, top) {
  let drawn = "";
  let pen = "M";
  values.forEach((value, i) => {
    if (value === null) {
      pen = "M";
      return;
    }
    const y = HEIGHT - 1 - (HEIGHT - 4) * Math.min(value / (top || 1), 1);
    drawn += `${pen}${x(offset + i)} ${y.toFixed(1)}`;
    pen = "L";
  });
  return drawn;
}

// The next round number.
function nice(value) {
  if (value <= 0) return 1;
  const ten = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((n) => n * ten).find((n) => n >= value);
}
