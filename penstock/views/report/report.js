"use strict";
(() => {
const $ = (id) => document.getElementById(id);
if (!$("data")) return;
const data = JSON.parse($("data").textContent);
const canvas = $("canvas"), tip = $("tip"), select = $("select"), pen = canvas.getContext("2d");
const [stages, microbatches] = data.sizes;
const scheme = matchMedia("(prefers-color-scheme: dark)");
const TITLE = 30, AXIS = 26, GAP = 4;

// ---- the traces, unpacked: a pass is an object with its rank, kind, stage, microbatch, start and end in ticks
const traces = data.traces.map((given, number) => {
  const codes = given.codes || data.traces[0].codes, rows = [];
  let place = 0;
  for (const [rank, count] of given.counts.entries()) {
    let end = 0;
    const row = [];
    for (const last = place + count; place < last; place++) {
      const code = codes[place], start = end + given.gaps[place];
      end = start + given.lengths[place];
      const microbatch = code % microbatches, rest = Math.floor(code / microbatches);
      row.push({ trace: number, rank, microbatch, stage: rest % stages, kind: Math.floor(rest / stages), start, end,
        code, half: given.halves ? given.halves[place] : 0 });
    }
    rows.push(row);
  }
  return { name: given.name, end: given.end, rows, path: given.path, byCode: new Map(rows.flat().map((p) => [p.code, p])) };
});
const whole = Math.max(...traces.map((trace) => trace.end)) || 1;
const rowHeight = Math.max(9, Math.min(28, 420 / (data.ranks.length * traces.length)));
const height = traces.length * (TITLE + data.ranks.length * rowHeight) + AXIS;
let from = 0, to = whole, hovered = null, drag = null, width = 0, labels = data.ranks, left = 0;

const seconds = (ticks) => {
  const value = ticks * data.tick;
  const [scale, unit] = [[1, "s"], [1e-3, "ms"], [1e-6, "us"]].find(([scale]) => Math.abs(value) >= scale) || (value ? [1e-9, "ns"] : [1, "s"]);
  return `${Number((value / scale).toPrecision(4))} ${unit}`;
};
const at = (tick) => left + ((tick - from) / (to - from)) * (width - left);
const tickAt = (x) => from + ((x - left) / (width - left)) * (to - from);
// Stretched, every timeline is as long as the longest.
const scale = (number) => ($("stretch").checked ? whole / (traces[number].end || 1) : 1);
const top = (trace, rank) => trace * (TITLE + data.ranks.length * rowHeight) + TITLE + rank * rowHeight;
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- drawing
function draw() {
  const ratio = window.devicePixelRatio || 1;
  width = canvas.parentElement.clientWidth;
  // Where there is little room, a rank is named without its stages.
  labels = width < 560 ? data.ranks.map((label) => label.split(":")[0]) : data.ranks;
  left = Math.max(...labels.map((text) => text.length)) * 7 + 10;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const colors = { ink: variable("--ink"), faint: variable("--faint"), idle: variable("--idle"), rule: variable("--rule"), paper: variable("--paper") };
  pen.fillStyle = colors.paper;
  pen.fillRect(0, 0, width, height);
  pen.textBaseline = "middle";
  traces.forEach((trace, number) => drawTrace(trace, number, colors));
  drawAxis(colors);
}

function drawTrace(trace, number, colors) {
  const fills = data[scheme.matches ? "dark" : "light"];
  const font = (size, weight) => { pen.font = `${weight || 400} ${size}px system-ui, sans-serif`; };
  pen.textAlign = "left";
  pen.fillStyle = colors.ink;
  font(13, 600);
  pen.fillText(trace.name, left, top(number, 0) - 13);
  const shift = pen.measureText(trace.name).width + 10;
  pen.fillStyle = colors.faint;
  font(12);
  pen.fillText(seconds(trace.end), left + shift, top(number, 0) - 13);
  const every = Math.ceil(12 / rowHeight);
  labels.forEach((label, rank) => {
    const y = top(number, rank);
    pen.fillStyle = colors.ink;
    font(12);
    pen.textAlign = "right";
    if (rank % every === 0) pen.fillText(label, left - 8, y + rowHeight / 2);
    pen.fillStyle = colors.idle;
    pen.fillRect(left, y + GAP / 2, Math.max(0, Math.min(width, at(trace.end * scale(number))) - left), rowHeight - GAP);
  });
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, width - left, height);
  pen.clip();
  font(11);
  pen.textAlign = "center";
  for (const row of trace.rows) for (const pass of row) drawPass(pass, number, fills);
  pen.globalAlpha = 1;
  if ($("critical").checked) drawPath(trace, number, colors);
  if (hovered && hovered.trace === number) {
    const [x, y, w, h] = box(hovered, number);
    pen.strokeStyle = colors.ink;
    pen.lineWidth = 2;
    pen.strokeRect(x, y, Math.max(w, 1), h);
  }
  pen.restore();
}

function box(pass, number) {
  const full = rowHeight - GAP, h = pass.half ? full / 2 : full, x = at(pass.start * scale(number));
  return [x, top(number, pass.rank) + GAP / 2 + (pass.half === 2 ? h : 0), at(pass.end * scale(number)) - x, h];
}

function drawPass(pass, number, fills) {
  const [x, y, w, h] = box(pass, number), chunk = data.chunks[pass.stage];
  if (x > width || x + w < left) return;
  pen.globalAlpha = hovered && hovered.microbatch !== pass.microbatch ? 0.35 : 1;
  pen.fillStyle = fills[pass.kind][chunk];
  pen.fillRect(x, y, Math.max(0.6, w - (w > 4 ? 0.8 : 0)), h);
  const short = data.kinds[pass.kind][0] + pass.microbatch, long = pass.stage + short;
  const text = w > long.length * 6.6 + 4 && stages > data.ranks.length ? long : short;
  if (h >= 10 && w > text.length * 6.6 + 3) {
    pen.fillStyle = data.inks[pass.kind][chunk];
    pen.fillText(text, x + w / 2, y + h / 2 + 0.5);
  }
}

function drawPath(trace, number, colors) {
  pen.strokeStyle = colors.ink;
  pen.lineWidth = 2;
  pen.lineJoin = "round";
  pen.beginPath();
  for (let place = 0; place < trace.path.length; place += 2)
    pen.lineTo(at(trace.path[place + 1] * scale(number)), top(number, trace.path[place]) + rowHeight - GAP / 2);
  pen.stroke();
}

function drawAxis(colors) {
  // Of stretched timelines the axis has shares of a step, as each has its own seconds.
  const isShare = $("stretch").checked, unit = isShare ? 100 / whole : data.tick;
  const text = (value) => (isShare ? `${Number(value.toPrecision(4))} %` : seconds(value / data.tick));
  const y = height - AXIS + 4, span = (to - from) * unit, rough = span / Math.max(2, (width - left) / 90);
  const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  pen.strokeStyle = colors.rule;
  pen.lineWidth = 1;
  pen.fillStyle = colors.faint;
  pen.font = "11px system-ui, sans-serif";
  pen.beginPath();
  pen.moveTo(left, y);
  pen.lineTo(width, y);
  for (let value = Math.ceil((from * unit) / step) * step; value <= to * unit * (1 + 1e-9); value += step) {
    const x = at(value / unit);
    pen.moveTo(x, y);
    pen.lineTo(x, y + 4);
    pen.textAlign = x > width - 30 ? "right" : x < left + 20 ? "left" : "center";
    pen.fillText(text(Math.abs(value) < step / 1e6 ? 0 : value), x, y + 13);
  }
  pen.stroke();
}

// ---- moving
let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; draw(); });
}
function look(first, last) {
  const length = Math.min(whole, Math.max(whole / 2000, last - first));
  from = Math.max(0, Math.min(whole - length, first));
  to = from + length;
  // For whoever looks at the page from outside: the seconds that are in view.
  canvas.dataset.from = from * data.tick;
  canvas.dataset.to = to * data.tick;
  redraw();
}
function zoom(factor, center = (from + to) / 2) {
  look(center - (center - from) * factor, center + (to - center) * factor);
}
const move = (share) => look(from + share * (to - from), to + share * (to - from));
const actions = { in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.25), right: () => move(0.25), all: () => look(0, whole) };
const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all", Home: "all" };

// ---- pointing
const place = (event) => { const frame = canvas.getBoundingClientRect(); return [event.clientX - frame.left, event.clientY - frame.top]; };
function passAt([x, y]) {
  if (x < left) return null;
  for (const [number, trace] of traces.entries()) {
    const tick = tickAt(x) / scale(number);
    const rank = Math.floor((y - top(number, 0)) / rowHeight);
    if (rank < 0 || rank >= trace.rows.length) continue;
    const slack = ((to - from) / (width - left) / scale(number)) * 1.5;
    const near = trace.rows[rank].filter((pass) => pass.start - slack <= tick && tick <= pass.end + slack);
    const lower = y - top(number, rank) > rowHeight / 2;
    const fitting = near.filter((pass) => !pass.half || (pass.half === 2) === lower);
    if (fitting.length) return fitting.reduce((a, b) => (distance(a, tick) <= distance(b, tick) ? a : b));
  }
  return null;
}
const distance = (pass, tick) => Math.max(pass.start - tick, tick - pass.end, 0);
function describe(pass) {
  const lines = [`${data.kinds[pass.kind][1]} · microbatch ${pass.microbatch}`, `rank ${pass.rank} · stage ${pass.stage}`];
  lines.push(`start ${seconds(pass.start)} · length ${seconds(pass.end - pass.start)}`);
  const own = traces[pass.trace];
  for (const other of traces) {
    const twin = other !== own && other.byCode.get(pass.code);
    if (!twin) continue;
    const ratio = (pass.end - pass.start) / (twin.end - twin.start);
    const change = Number.isFinite(ratio) ? ` (${own.name} is ${ratio.toFixed(2)} ×)` : "";
    lines.push(`${other.name}: start ${seconds(twin.start)} · length ${seconds(twin.end - twin.start)}${change}`);
  }
  return lines.join("\n");
}
function point(event) {
  const found = passAt(place(event));
  if (found !== hovered) { hovered = found; redraw(); }
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = describe(found);
  const right = event.clientX + 16 + tip.offsetWidth > window.innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - tip.offsetWidth - 12 : event.clientX + 16)}px`;
  const below = event.clientY + 20 + tip.offsetHeight > window.innerHeight;
  tip.style.top = `${Math.max(4, below ? event.clientY - tip.offsetHeight - 12 : event.clientY + 20)}px`;
}
function leave() { hovered = null; tip.hidden = true; redraw(); }

canvas.addEventListener("pointerdown", (event) => {
  if (event.button || event.pointerType === "touch") return;
  drag = place(event)[0];
});
canvas.addEventListener("pointermove", (event) => {
  point(event);
  if (drag === null) return;
  const x = place(event)[0];
  select.hidden = Math.abs(x - drag) < 4;
  select.style.left = `${Math.max(left, Math.min(x, drag))}px`;
  select.style.width = `${Math.abs(x - drag)}px`;
});
window.addEventListener("pointerup", (event) => {
  if (drag === null) return;
  const x = place(event)[0];
  if (Math.abs(x - drag) >= 4) look(tickAt(Math.max(left, Math.min(x, drag))), tickAt(Math.min(width, Math.max(x, drag))));
  drag = null;
  select.hidden = true;
});
canvas.addEventListener("pointerleave", leave);
canvas.addEventListener("dblclick", actions.all);
canvas.addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 200))), tickAt(Math.max(left, place(event)[0])));
  } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    move((event.deltaX || event.deltaY) / 1000);
  }
}, { passive: false });
canvas.addEventListener("keydown", (event) => {
  if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  actions[keys[event.key]]();
});
document.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", actions[button.dataset.do]));
$("critical").addEventListener("change", redraw);
$("stretch").addEventListener("change", redraw);
$("stretch").parentElement.hidden = traces.length < 2;
scheme.addEventListener("change", () => { legend(); redraw(); });
window.addEventListener("resize", redraw);

function legend() {
  $("legend").replaceChildren(...data.kinds.map(([, word], kind) => {
    const entry = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = data[scheme.matches ? "dark" : "light"][kind][0];
    entry.append(swatch, word);
    return entry;
  }));
}

document.documentElement.classList.add("js");
$("zoom").hidden = false;
legend();
draw();
look(0, whole);
})();
