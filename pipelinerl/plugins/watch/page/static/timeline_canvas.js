// Draws the lanes on a canvas. Versions cycle through eight colours. Spans narrower than a pixel are drawn one pixel wide,
// with an opacity of their busy share.
import { duration, number, words } from "./format.js";
import { colour, firstFrom, sheet } from "./plot.js";
import { visible } from "./view.js";

const LANE = 26;
const BAR = 18;
const AXIS = 24;
const ROW = 6;
const NAMED = 34;
const MOST_ROWS = 64;
const FONT = "12px system-ui, sans-serif";
const NARROW = "11px system-ui, sans-serif";
// By track: the hue of its spans, 1 to 8 (none: by version), and their height in the lane. Narrow spans have the full
// hue, labelled ones are pale.
const LOOKS = {
  serves: { high: 1 },
  pause: { fill: "c7", high: 1, thin: true },
  away: { fill: "bad-wash", high: 1 },
  step: { hue: 1, high: 1 },
  wait: { hue: 2, high: 1 },
  publish_wait: { hue: 4, high: 0.5 },
  publish: { hue: 4, high: 0.7 },
  evaluation: { hue: 3, high: 1 },
  checkpoint: { hue: 5, high: 0.7 },
  stall: { hue: 7, high: 0.7 },
};
const ROLLOUTS = "rollouts";

// Packs rollouts into as few rows as possible without overlap; cached in the data because every drawing needs it.
function packed(data) {
  if (data.packed) return data.packed;
  const { claimed = [], trained = [], verified = [], sampled = [] } = data.groups ?? {};
  const order = claimed
    .map((_, at) => at)
    .filter((at) => Number.isFinite(claimed[at]))
    .sort((a, b) => claimed[a] - claimed[b]);
  const ends = [];
  const rows = new Map();
  for (const at of order) {
    const end = trained[at] ?? verified[at] ?? sampled[at] ?? claimed[at];
    let row = ends.findIndex((free) => free <= claimed[at]);
    if (row < 0) row = ends.length;
    if (row >= MOST_ROWS) continue;
    ends[row] = end;
    rows.set(at, row);
  }
  data.packed = { rows, count: ends.length };
  return data.packed;
}

export function heightOf(data) {
  const rows = packed(data).count;
  return AXIS + data.lanes.length * LANE + (rows ? Math.max(LANE, rows * ROW + 8) : 0) + 4;
}

export function draw(canvas, data, range) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const paper = sheet(canvas, width, height);
  const left = width < 520 ? 76 : 148;
  const plot = {
    paper,
    left,
    width: width - left,
    low: range[0],
    scale: (width - left) / (range[1] - range[0]),
    right: width,
  };
  canvas.plotted = { left, width: plot.width };
  drawAxis(plot, range, height);
  data.lanes.forEach((lane, index) => drawLane(plot, lane, AXIS + index * LANE));
  drawRollouts(plot, data, AXIS + data.lanes.length * LANE);
  drawMarks(plot, data.marks, height);
}

function drawAxis({ paper, left, width, low, scale, right }, [from, to], height) {
  const least = (90 / width) * (to - from);
  const power = 10 ** Math.floor(Math.log10(least));
  const nice =
    least >= 60
      ? [60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400]
      : [1, 2, 5, 10].map((each) => each * power);
  const each = nice.find((step) => step >= least) ?? nice[nice.length - 1] * Math.ceil(least / nice[nice.length - 1]);
  paper.font = NARROW;
  paper.textBaseline = "middle";
  for (let at = Math.ceil(from / each) * each; at <= to; at += each) {
    const x = left + (at - low) * scale;
    paper.fillStyle = colour("line");
    paper.fillRect(Math.round(x), AXIS - 4, 1, height - AXIS);
    paper.fillStyle = colour("soft");
    const text = each < 1 ? `${number(at, 6)} s` : duration(Math.round(at * 10) / 10);
    if (x + 4 + paper.measureText(text).width < right) paper.fillText(text, x + 4, 10);
  }
}

function drawLane(plot, lane, top) {
  const { paper, left } = plot;
  paper.font = FONT;
  paper.textBaseline = "middle";
  paper.fillStyle = colour("sunk");
  paper.fillRect(left, top + 3, plot.width, BAR + 2);
  for (const track of lane.tracks) drawTrack(plot, track, top + 4);
  drawName(plot, lane.kind === "engine" ? lane.lane.replace(/^https?:\/\//, "") : lane.lane, top + 4 + BAR / 2);
}

function drawName({ paper, left }, name, middle) {
  paper.clearRect(0, middle - LANE / 2, left, LANE);
  paper.font = FONT;
  paper.fillStyle = colour("ink");
  let text = visible(String(name)).slice(0, 60);
  while (text.length > 1 && paper.measureText(text).width > left - 10) text = `${text.slice(0, -2)}…`;
  paper.fillText(text, 2, middle);
}

function drawTrack({ paper, left, low, scale, right }, track, top) {
  const shape = LOOKS[track.kind] ?? { fill: "edge", high: 0.5 };
  const height = Math.round(BAR * shape.high);
  const y = top + BAR - height;
  const { start, end, value, count, busy } = track;
  for (let at = firstFrom(end, low); at < start.length; at += 1) {
    const from = Math.max(left, left + (start[at] - low) * scale);
    if (from > right) break;
    const to = Math.min(right, left + (end[at] - low) * scale);
    const wide = Math.max(1, to - from);
    const share = count[at] > 1 ? busy[at] / Math.max(end[at] - start[at], 1e-9) : 1;
    const named = wide > NAMED && height === BAR && count[at] === 1 && !shape.thin;
    const hue = shape.hue ?? 1 + (Math.abs(value[at] ?? 0) % 8);
    paper.globalAlpha = Math.max(0.25, Math.min(1, share) * Math.min(1, (end[at] - start[at]) * scale));
    paper.fillStyle = colour(shape.fill ?? (named ? `v${hue - 1}` : `c${hue}`));
    paper.fillRect(from, y, wide, height);
    if (named && !shape.fill) {
      paper.fillStyle = colour(`c${hue}`);
      paper.fillRect(from, y + height - 3, wide, 3);
    }
    paper.globalAlpha = 1;
    if (wide > 6) {
      paper.fillStyle = colour("card");
      paper.fillRect(to - 1, y, 1, height);
    }
    if (named) label(paper, track, at, from, wide, y + height / 2);
  }
}

function label(paper, track, at, from, wide, middle) {
  const name =
    track.kind === "serves" && track.value[at] >= 0
      ? `v${track.value[at]}`
      : track.kind === "wait" || track.kind === "away"
        ? visible(track.note[at] || track.kind)
        : track.value[at] >= 0
          ? `${track.value[at]}`
          : visible(track.note[at] ?? "");
  paper.font = NARROW;
  if (paper.measureText(name).width > wide - 8) return;
  paper.fillStyle = track.kind === "away" ? colour("bad") : colour("ink");
  paper.fillText(name, from + 4, middle + 0.5);
}

function drawRollouts(plot, data, top) {
  const { rows, count } = packed(data);
  if (!count) return;
  const { paper, left, low, scale, right } = plot;
  const { claimed, sampled, verified, trained, spans } = data.groups;
  const bar = (from, to, y, high, fill) => {
    const a = Math.max(left, left + (from - low) * scale);
    const b = Math.min(right, left + (to - low) * scale);
    if (b < left || a > right || !(to >= from)) return;
    paper.fillStyle = fill;
    paper.fillRect(a, y, Math.max(0.75, b - a), high);
  };
  for (const [at, row] of rows) {
    const y = top + 4 + row * ROW;
    if (left + (claimed[at] - low) * scale > right) continue;
    const tokens = spans[at].reduce((sum, [, each]) => sum + each, 0) || 1;
    const each = ((sampled[at] ?? claimed[at]) - claimed[at]) / tokens;
    let from = claimed[at];
    for (const [version, length] of spans[at]) {
      bar(from, from + each * length, y, ROW - 1, colour(`c${1 + (Math.abs(version) % 8)}`));
      from += each * length;
    }
    if (verified[at] !== null) bar(sampled[at], verified[at], y, ROW - 1, colour("ink"));
    if (trained[at] !== null && verified[at] !== null) bar(verified[at], trained[at], y + 2, 1, colour("edge"));
  }
  drawName(plot, ROLLOUTS, top + 4 + BAR / 2);
  paper.clearRect(0, top + LANE, left, count * ROW);
}

function drawMarks({ paper, left, low, scale, right }, marks, height) {
  for (const [at, kind] of marks) {
    const x = left + (at - low) * scale;
    if (x < left || x > right) continue;
    paper.fillStyle = /lost|failed|alarm$|stalled/.test(kind) ? colour("bad") : colour("soft");
    paper.fillRect(Math.round(x), AXIS - 5, 1.5, height - AXIS);
    paper.beginPath();
    paper.arc(Math.round(x) + 0.5, AXIS - 5, 3, 0, 7);
    paper.fill();
  }
}

// Describes the part at a time and a height; empty if there is none.
export function partAt(data, time, y, span) {
  const near = span / 300;
  const index = Math.floor((y - AXIS) / LANE);
  if (y < AXIS) {
    const mark = data.marks.find(([at]) => Math.abs(at - time) < near);
    return mark ? `${duration(mark[0])}: ${words(mark[1])}, ${visible(String(mark[2]))}` : "";
  }
  const lane = data.lanes[index];
  if (!lane) return rolloutAt(data, time, y);
  const parts = [];
  for (const track of lane.tracks) {
    const at = firstFrom(track.end, time);
    if (at >= track.start.length || track.start[at] > time) continue;
    const what =
      track.kind === "serves" && track.value[at] >= 0
        ? `serves version ${track.value[at]}`
        : `${words(track.kind)} ${track.value[at] >= 0 ? track.value[at] : ""}`.trim();
    const note = track.note[at] ? `, ${visible(String(track.note[at]))}` : "";
    const many = track.count[at] > 1 ? `, the longest of ${number(track.count[at])}` : "";
    parts.push(`${what}${note}${many}: ${duration(track.busy[at])} from ${duration(track.start[at])}`);
  }
  return parts.length ? `${visible(lane.lane)} · ${parts.join(" · ")}` : "";
}

function rolloutAt(data, time, y) {
  const { rows } = packed(data);
  const row = Math.floor((y - AXIS - data.lanes.length * LANE - 4) / ROW);
  const { claimed, sampled, verified, trained, spans, order, step } = data.groups ?? {};
  for (const [at, mine] of rows) {
    if (mine !== row || claimed[at] > time || (trained[at] ?? verified[at] ?? sampled[at]) < time) continue;
    const versions = spans[at].map(([version, count]) => `v${version} × ${count}`).join(", ");
    return `rollout ${order[at]}: sampled in ${duration(sampled[at] - claimed[at])} (${versions}), verified in ${duration(verified[at] - sampled[at])}, trained in step ${step[at] ?? "–"}`;
  }
  return "";
}
