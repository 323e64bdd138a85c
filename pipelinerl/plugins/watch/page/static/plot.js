// Draws lines over a common x on a canvas, with axes, a cursor and a zoom selection. A plot redraws when
// its data, size, colours or shared window change: at most once per frame, and not while it is out of view.
import { number, tick } from "./format.js";
import { onTheme } from "./theme.js";

const FONT = "11px system-ui, sans-serif";
const LEFT = 36; // minimum, to align charts below one another
const TOP = 8;
const RIGHT = 12;
const BOTTOM = 24;
const ROOM = 0.06; // above and below the lines, as a share of their range
const X_SPACE = 70; // pixels between two ticks
const Y_SPACE = 30;
const LEAST_DRAG = 4;

export class Plot {
  // The plot fills `box`. `shared` holds the window and the cursor of one or several plots.
  // `pointed(index)` is called when the cursor moves to another point of x; with null when it leaves.
  constructor(box, shared, pointed) {
    this.box = box;
    this.shared = shared;
    this.pointed = pointed;
    this.figure = null;
    this.size = [0, 0];
    this.area = { left: 0, width: 1, height: 1 };
    this.isSeen = true;
    this.isStale = false;
    this.frame = 0;
    this.canvas = box.appendChild(document.createElement("canvas"));
    this.hair = box.appendChild(document.createElement("i"));
    this.hair.className = "hair";
    this.choice = box.appendChild(document.createElement("i"));
    this.choice.className = "choice";
    // Called with the initial size as well, before the page is painted. Reading the box's size would force a layout
    // per plot.
    this.sized = new ResizeObserver(([entry]) => {
      this.size = [entry.contentRect.width, entry.contentRect.height];
      this.draw();
    });
    this.sized.observe(box);
    this.sight = new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      if (this.isSeen && this.isStale) this.drawSoon();
    });
    this.sight.observe(box);
    this.leave = [
      shared.subscribe((what) => (what === "cursor" ? this.showCursor() : this.drawSoon())),
      onTheme(() => this.drawSoon()),
    ];
    this.grabbedAt = null;
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerleave", () => this.grabbedAt === null && shared.point(null));
    this.canvas.addEventListener("pointerdown", (event) => this.grab(event));
    this.canvas.addEventListener("pointerup", (event) => this.release(event));
    this.canvas.addEventListener("pointercancel", () => this.drop());
  }

  // A figure is {x, lines, marks, format, label, formatX}; see `Chart`.
  show(figure) {
    this.figure = figure;
    this.drawSoon();
    this.showCursor();
  }

  close() {
    this.sized.disconnect();
    this.sight.disconnect();
    for (const leave of this.leave) leave();
    cancelAnimationFrame(this.frame);
    this.box.replaceChildren();
  }

  drawSoon() {
    if (!this.isSeen) this.isStale = true;
    else this.frame ||= requestAnimationFrame(() => this.draw());
  }

  // Returns the value of x at a screen position.
  valueAt(clientX) {
    const { left, width } = this.area;
    const [low, high] = this.range();
    const share = (clientX - this.canvas.getBoundingClientRect().left - left) / width;
    return low + Math.min(1, Math.max(0, share)) * (high - low);
  }

  // Returns the full range of x.
  whole() {
    const { x } = this.figure;
    const [first, last] = [x[0] ?? 0, x[x.length - 1] ?? 1];
    return first === last ? [first - 1, last + 1] : [first, last];
  }

  range() {
    return this.shared.range ?? this.whole();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.isStale = false;
    const [width, height] = this.size;
    if (!this.figure || !width || !height) return;
    const paper = sheet(this.canvas, width, height);
    const { x, lines, marks = [], format = number, formatX = number } = this.figure;
    const range = this.range();
    const [from, to] = [Math.max(0, firstFrom(x, range[0]) - 1), Math.min(x.length, firstFrom(x, range[1]) + 2)];
    const limits = limitsOf(lines, from, to);
    const ticks = ticksOf(limits, (height - TOP - BOTTOM) / Y_SPACE).map((at) => [at, tick(format(at))]);
    paper.font = FONT;
    const left = Math.ceil(Math.max(LEFT, ...ticks.map(([, text]) => paper.measureText(text).width)) + 10);
    this.area = { left, width: Math.max(1, width - left - RIGHT), height: height - TOP - BOTTOM };
    const scale = {
      x: (value) => left + ((value - range[0]) / (range[1] - range[0])) * this.area.width,
      y: (value) => TOP + (1 - (value - limits[0]) / (limits[1] - limits[0])) * this.area.height,
    };
    this.drawAxes(paper, scale, ticks, ticksOf(range, this.area.width / X_SPACE, 1), formatX);
    paper.save();
    paper.beginPath();
    paper.rect(left, 0, this.area.width + RIGHT, height - BOTTOM + 1);
    paper.clip();
    for (const mark of marks) drawMark(paper, scale.x(mark.x), this.area.height);
    for (const line of lines) drawLine(paper, scale, x, line, from, to, colour(`c${line.colour}`));
    paper.restore();
    this.showCursor();
  }

  drawAxes(paper, scale, yTicks, xTicks, formatX) {
    const { left, width, height } = this.area;
    paper.textBaseline = "middle";
    for (const [at, text] of yTicks) {
      paper.fillStyle = colour("line");
      paper.fillRect(left, Math.round(scale.y(at)), width, 1);
      paper.fillStyle = colour("soft");
      paper.textAlign = "right";
      paper.fillText(text, left - 7, scale.y(at));
    }
    paper.textAlign = "center";
    let free = 0;
    for (const at of xTicks) {
      const text = formatX(at);
      const half = paper.measureText(text).width / 2;
      const middle = Math.min(Math.max(scale.x(at), left + half - 8), left + width + RIGHT - half);
      if (middle - half < free) continue;
      free = middle + half + 12;
      paper.fillText(text, middle, TOP + height + 14);
    }
  }

  showCursor() {
    const { x } = this.figure ?? { x: [] };
    const [low, high] = this.range();
    const { cursor } = this.shared;
    const at = cursor === null || !x.length ? null : nearest(x, cursor);
    this.pointed(at);
    const isInside = at !== null && x[at] >= low && x[at] <= high;
    this.hair.hidden = !isInside;
    if (!isInside) return;
    const { left, width, height } = this.area;
    const place = left + ((x[at] - low) / (high - low)) * width;
    Object.assign(this.hair.style, { left: `${place}px`, top: `${TOP}px`, height: `${height}px` });
  }

  grab(event) {
    if (event.button !== 0) return;
    this.grabbedAt = event.clientX;
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    this.shared.point(this.valueAt(event.clientX));
    const isDragged = this.grabbedAt !== null && Math.abs(event.clientX - this.grabbedAt) >= LEAST_DRAG;
    this.choice.hidden = !isDragged;
    if (!isDragged) return;
    const { left, width, height } = this.area;
    const inside = (clientX) => Math.min(left + width, Math.max(left, clientX - this.canvas.getBoundingClientRect().left));
    const [a, b] = [inside(this.grabbedAt), inside(event.clientX)].sort((one, other) => one - other);
    Object.assign(this.choice.style, { left: `${a}px`, width: `${b - a}px`, top: `${TOP}px`, height: `${height}px` });
  }

  release(event) {
    if (this.grabbedAt === null) return;
    const [low, high] = [this.valueAt(this.grabbedAt), this.valueAt(event.clientX)].sort((a, b) => a - b);
    const isDragged = Math.abs(event.clientX - this.grabbedAt) >= LEAST_DRAG;
    this.drop();
    if (isDragged && high > low) this.shared.set([low, high]);
  }

  drop() {
    this.grabbedAt = null;
    this.choice.hidden = true;
  }
}

// Returns the context of a canvas, cleared and scaled to this size in CSS pixels.
export function sheet(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  const paper = canvas.getContext("2d");
  paper.setTransform(ratio, 0, 0, ratio, 0, 0);
  paper.clearRect(0, 0, width, height);
  return paper;
}

// The page's colours by name, read once for a theme.
let palette = new Map();
onTheme(() => {
  palette = new Map();
});

export function colour(name) {
  if (!palette.has(name)) {
    palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  }
  return palette.get(name);
}

// Returns the first index in rising values whose value is at least `value`.
export function firstFrom(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(sorted, value) {
  const at = Math.min(sorted.length - 1, firstFrom(sorted, value));
  return at > 0 && value - sorted[at - 1] < sorted[at] - value ? at - 1 : at;
}

// Returns the range of the y axis: that of the points from `from` to `to`, with a margin.
function limitsOf(lines, from, to) {
  let [least, most] = [Infinity, -Infinity];
  for (const line of lines) {
    for (const values of [line.values, line.low, line.high]) {
      for (let at = from; values && at < to; at += 1) {
        const value = values[at];
        if (!Number.isFinite(value)) continue;
        if (value < least) least = value;
        if (value > most) most = value;
      }
    }
  }
  if (least > most) return [0, 1];
  const room = (most - least || Math.abs(most) || 1) * ROOM;
  return [least - room, most + room];
}

// Returns about `count` round values inside [low, high], in steps of 1, 2 or 5 times a power of ten.
function ticksOf([low, high], count, least = 0) {
  const rough = Math.max(least, (high - low) / Math.max(1, count));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const ticks = [];
  for (let number = Math.ceil(low / step); number * step <= high; number += 1) {
    ticks.push(Number((number * step).toPrecision(12)));
  }
  return ticks;
}

function drawMark(paper, place, height) {
  paper.strokeStyle = colour("soft");
  paper.lineWidth = 1;
  paper.setLineDash([3, 3]);
  paper.beginPath();
  paper.moveTo(place, TOP);
  paper.lineTo(place, TOP + height);
  paper.stroke();
  paper.setLineDash([]);
}

function drawLine(paper, scale, x, line, from, to, colour) {
  paper.strokeStyle = colour;
  paper.fillStyle = colour;
  const known = [];
  for (let at = from; at < to; at += 1) if (Number.isFinite(line.values[at])) known.push(at);
  if (line.low) {
    const bounded = known.filter((at) => Number.isFinite(line.low[at]) && Number.isFinite(line.high[at]));
    paper.globalAlpha = 0.2;
    paper.beginPath();
    for (const at of bounded) paper.lineTo(scale.x(x[at]), scale.y(line.high[at]));
    for (const at of bounded.reverse()) paper.lineTo(scale.x(x[at]), scale.y(line.low[at]));
    paper.fill();
  }
  paper.globalAlpha = line.faint ? 0.35 : 1;
  paper.lineWidth = line.faint ? 1 : 1.6;
  paper.lineJoin = "round";
  paper.beginPath();
  for (const at of known) paper.lineTo(scale.x(x[at]), scale.y(line.values[at]));
  paper.stroke();
  if (line.dots || known.length === 1) {
    for (const at of known) {
      paper.beginPath();
      paper.arc(scale.x(x[at]), scale.y(line.values[at]), 3, 0, 7);
      paper.fill();
    }
  }
  paper.globalAlpha = 1;
}
