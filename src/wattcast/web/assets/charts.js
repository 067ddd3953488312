// Charts as plain SVG. Colours come from classes, so that themes need no redraw; nothing moves by itself.
import { element, number } from "/assets/format.js";

const NS = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...inside) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...inside);
  return made;
}

export function ticks(low, high, wanted = 5) {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / wanted));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => span / s <= wanted) || 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9 * step; at += step) found.push(at);
  return found;
}

const decades = (low, high) => {
  const found = [];
  for (let e = Math.ceil(Math.log10(low)); 10 ** e <= high; e += 1) found.push(10 ** e);
  return found;
};
const short = (value) => (Math.abs(value) >= 1e4 ? number(value, 3) : Number(value.toPrecision(4)).toString());
const moduleClass = (name) => `m-${/^[a-z0-9]+$/.test(name) ? name : "other"}`;

// ---- reading and zooming: a cursor follows the pointer or the arrow keys; a drag, or + and -, shows a part of the x axis

const zooms = new WeakMap(); // element -> the part of its x axis that is shown, for one label
const ofAxis = (axis) => (axis.log ? Math.log10 : (v) => v);
function shownAxis(into, axis, label) {
  const zoom = zooms.get(into);
  if (zoom?.label === label) return { ...axis, low: zoom.low, high: zoom.high, zoomed: true };
  zooms.delete(into);
  return axis;
}

// ``points`` are {x, y, text, open}; Enter calls ``open`` of the point that is read. ``draw`` draws the chart again. ``keys``: the chart itself takes the focus and the arrow keys.
function readable(into, { root, sx, sy, box, x, whole, label, xName }, points, draw, keys = true) {
  const seen = points.map((p) => ({ ...p, px: sx(p.x), py: p.y === undefined ? null : sy(p.y) })).filter((p) => p.px >= box.left - 1 && p.px <= box.right + 1);
  const rule = svg("line", { y1: box.top, y2: box.bottom, class: "rule" }), said = svg("text", { y: xName.getAttribute("y"), x: box.right, "text-anchor": "end", class: "strong" });
  const span = svg("rect", { y: box.top, height: box.bottom - box.top, class: "span none" });
  root.append(rule, said, span);
  let now = -1;
  const read = (index) => {
    now = index;
    const point = seen[index], on = Boolean(point), most = Math.floor((box.right - 2) / 6.4);
    rule.classList.toggle("on", on);
    xName.classList.toggle("none", on);
    said.textContent = !on ? "" : point.text.length > most ? `${point.text.slice(0, most - 1)}\u2026` : point.text;
    if (!on) return;
    rule.setAttribute("x1", point.px); rule.setAttribute("x2", point.px);
    if (keys) { root.setAttribute("aria-valuenow", index); root.setAttribute("aria-valuetext", point.text); }
  };
  const zoomTo = (low, high) => {
    const focused = into.contains(document.activeElement), f = ofAxis(whole), back = whole.log ? (v) => 10 ** v : (v) => v;
    const [a, b] = [Math.max(low, f(whole.low)), Math.min(high, f(whole.high))];
    if (b - a < 1e-4 * (f(whole.high) - f(whole.low))) return;
    if (low <= f(whole.low) && high >= f(whole.high)) zooms.delete(into); else zooms.set(into, { label, low: back(a), high: back(b) });
    draw();
    if (focused) into.querySelector("svg [tabindex='0'], svg[tabindex='0']")?.focus();
  };
  const showAll = () => zoomTo(-Infinity, Infinity);
  const scaleBy = (by) => {
    const f = ofAxis(x), [low, high] = [f(x.low), f(x.high)], at = seen[now] ? f(seen[now].x) : (low + high) / 2;
    zoomTo(at - (at - low) * by, at + (high - at) * by);
  };
  const across = (event) => { const area = root.getBoundingClientRect(); return Math.min(Math.max(event.clientX - area.left, box.left), box.right); };
  const value = (px) => { const f = ofAxis(x); return f(x.low) + ((px - box.left) / (box.right - box.left)) * (f(x.high) - f(x.low)); };
  let from = null;
  root.addEventListener("pointerdown", (event) => { if (event.button === 0 && !event.target.closest(".handle, .pick")) from = across(event); });
  root.addEventListener("pointermove", (event) => {
    const at = across(event), up = event.clientY - root.getBoundingClientRect().top;
    const far = seen.map((p) => (p.px - at) ** 2 + (p.py === null ? 0 : (p.py - up) ** 2));
    read(far.indexOf(Math.min(...far)));
    if (from === null || Math.abs(at - from) < 8) return;
    if (!root.hasPointerCapture(event.pointerId)) root.setPointerCapture(event.pointerId);
    span.classList.remove("none");
    span.setAttribute("x", Math.min(at, from)); span.setAttribute("width", Math.abs(at - from));
  });
  root.addEventListener("pointerup", (event) => {
    const at = across(event), began = from;
    from = null;
    if (began !== null && Math.abs(at - began) >= 8) zoomTo(value(Math.min(at, began)), value(Math.max(at, began)));
  });
  root.addEventListener("pointercancel", () => { from = null; span.classList.add("none"); });
  root.addEventListener("pointerleave", () => { if (from === null) read(-1); });
  root.addEventListener("dblclick", showAll);
  root.addEventListener("keydown", (event) => {
    const { key } = event, by = { ArrowLeft: -1, ArrowRight: 1, Home: -1e6, End: 1e6 }[key];
    if (key === "Enter" && seen[now]?.open) seen[now].open();
    else if (by && keys && seen.length) read(Math.min(Math.max(now + by, 0), seen.length - 1));
    else if (key === "+" || key === "=") scaleBy(0.5);
    else if (key === "-") scaleBy(2);
    else if (key === "Escape" && x.zoomed) showAll();
    else return;
    event.preventDefault();
  });
  if (keys && seen.length) {
    for (const [name, text] of Object.entries({ role: "slider", tabindex: 0, "aria-valuemin": 0, "aria-valuemax": seen.length - 1, "aria-valuenow": 0, "aria-valuetext": seen[0].text })) root.setAttribute(name, text);
    root.addEventListener("focus", () => { if (now < 0) read(0); });
    root.addEventListener("blur", () => read(-1));
  }
  if (x.zoomed) into.append(element("button", { type: "button", class: "whole", onclick: showAll }, "Show all"));
}

// A frame with axes. ``x`` and ``y`` are {low, high, label, log, whole}; returns scales, and layers for marks (cut at the axes) and for words.
export function frame(into, { x: whole, y, height = 260, label, marks }) {
  const x = shownAxis(into, whole, label);
  const width = Math.max(into.clientWidth || 600, 260);
  const box = { left: 52, right: width - 10, top: 24, bottom: height - 38 };
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: marks ? "group" : "img", "aria-label": label });
  const place = (axis, from, to) => {
    const f = ofAxis(axis);
    const [a, b] = [f(axis.low), f(axis.high)];
    return (v) => from + ((f(v) - a) / (b - a || 1)) * (to - from);
  };
  const sx = place(x, box.left, box.right), sy = place(y, box.bottom, box.top);
  const of = (axis, wanted) => (axis.log ? decades(axis.low, axis.high) : ticks(axis.low, axis.high, wanted).filter((v) => !axis.whole || Number.isInteger(v)));
  const soft = { class: "soft", "aria-hidden": "true" };
  for (const at of of(y, 5)) {
    root.append(svg("line", { x1: box.left, x2: box.right, y1: sy(at), y2: sy(at), class: "grid" }),
      svg("text", { x: box.left - 7, y: sy(at) + 4, "text-anchor": "end", ...soft }, short(at)));
  }
  for (const at of of(x, Math.max(3, Math.floor(width / 110)))) {
    root.append(svg("line", { x1: sx(at), x2: sx(at), y1: box.bottom, y2: box.bottom + 4, class: "axis" }),
      svg("text", { x: Math.min(sx(at), width - 14), y: box.bottom + 18, "text-anchor": "middle", ...soft }, short(at)));
  }
  const xName = svg("text", { x: box.right, y: height - 4, "text-anchor": "end", ...soft }, x.label);
  root.append(svg("path", { d: `M${box.left} ${box.bottom}H${box.right}`, class: "axis" }), xName, svg("text", { x: 2, y: 13, ...soft }, y.label));
  let layer = root;
  if (x.zoomed) { // what lies outside the part shown is cut
    const id = `cut-${into.id}`;
    layer = svg("g", { "clip-path": `url(#${id})` });
    root.append(svg("clipPath", { id }, svg("rect", { x: box.left, y: 0, width: box.right - box.left, height: box.bottom + 1 })), layer);
  }
  into.replaceChildren(root);
  return { root, layer, sx, sy, box, width, x, whole, label, xName };
}

export const path = (xs, ys, sx, sy) => xs.map((v, i) => `${i ? "L" : "M"}${sx(v).toFixed(1)} ${sy(ys[i]).toFixed(1)}`).join("");

export function legend(into, items) {
  into.replaceChildren(...items.map(([name, css]) => element("span", {},
    svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { width: 10, height: 10, rx: 2, class: css })), name)));
}
export const moduleLegend = (into, names) => legend(into, names.map((name) => [name, moduleClass(name)]));

// Where the power goes: a column per operator, as wide as its time and as high as its power, so that area is energy.
// A column with ``open`` answers a click, and Enter.
export function powerArea(into, columns, parts, mean, label) {
  const total = columns.reduce((sum, c) => sum + c.seconds, 0);
  const most = Math.max(mean, ...columns.map((c) => c.watts.reduce((a, b) => a + b, 0))) * 1.05;
  const made = frame(into, {
    x: { low: 0, high: 100, label: "Share of the time (%)" }, y: { low: 0, high: most, label: "Power of one GPU (W)" }, height: 340, label,
  });
  const { root, layer, sx, sy, box } = made, points = [];
  let left = 0;
  columns.forEach((column, index) => {
    const right = left + (100 * column.seconds) / total;
    let below = 0;
    const { open } = column, group = svg("g", { class: open ? "column open" : "column", "data-index": index, onclick: open });
    column.watts.forEach((watts, part) => {
      if (watts <= 0) return;
      group.append(svg("rect", {
        x: sx(left), width: Math.max(sx(right) - sx(left) - 1.5, 0.5), y: sy(below + watts), height: Math.max(sy(below) - sy(below + watts), 0.2),
        class: moduleClass(parts[part]),
      }));
      below += watts;
    });
    const largest = parts.map((name, part) => [name, column.watts[part]]).sort((a, b) => b[1] - a[1]).slice(0, 2).map(([name, watts]) => `${name} ${number(watts)} W`);
    points.push({ x: (left + right) / 2, text: `${column.mark} ${column.name}: ${number(below)} W, most of it ${largest.join(" and ")}`, open });
    if (sx(right) - sx(left) > Math.max(16, 7 * column.mark.length)) group.append(svg("text", { x: (sx(left) + sx(right)) / 2, y: Math.max(sy(below) - 5, box.top - 2), "text-anchor": "middle", class: "strong" }, column.mark));
    layer.append(group);
    left = right;
  });
  root.append(svg("line", { x1: box.left, x2: box.right, y1: sy(mean), y2: sy(mean), class: "mean" }),
    svg("text", { x: box.right, y: 13, "text-anchor": "end", class: "strong" }, `- - mean ${number(mean)} W`));
  readable(into, made, points, () => powerArea(into, columns, parts, mean, label));
}

// Power over time, its parts on one another.
export function stack(into, { start, end, parts, mean, label, yLabel, states }) {
  const names = Object.keys(parts), total = start.map((_, i) => names.reduce((sum, name) => sum + parts[name][i], 0));
  const [by, unit] = end >= 7200 ? [1 / 3600, "h"] : end >= 1 ? [1, "s"] : end >= 1e-3 ? [1e3, "ms"] : [1e6, "\u00b5s"];
  const made = frame(into, { x: { low: 0, high: end * by, label: `Time (${unit})` }, y: { low: 0, high: Math.max(...total) * 1.08, label: yLabel }, height: 300, label });
  const { root, layer, sx, sy, box } = made, below = start.map(() => 0);
  const ends = [...start.slice(1), end], steps = (levels) => levels.map((w, i) => `L${sx(start[i] * by).toFixed(1)} ${sy(w).toFixed(1)}H${sx(ends[i] * by).toFixed(1)}`);
  for (const name of names) {
    const bottom = [...below];
    parts[name].forEach((watts, i) => { below[i] += watts; });
    const back = bottom.map((w, i) => `L${sx(ends[i] * by).toFixed(1)} ${sy(w).toFixed(1)}H${sx(start[i] * by).toFixed(1)}`).reverse();
    layer.append(svg("path", { d: `M${steps(below).join("").slice(1)}${back.join("")}Z`, class: moduleClass(name) }));
  }
  root.append(svg("line", { x1: box.left, x2: box.right, y1: sy(mean), y2: sy(mean), class: "mean" }),
    svg("text", { x: box.right, y: 13, "text-anchor": "end", class: "strong" }, `- - mean ${number(mean)} W`));
  const points = start.map((at, i) => {
    const most = names.map((name) => [name, parts[name][i]]).sort((a, b) => b[1] - a[1])[0];
    return { x: ((at + ends[i]) / 2) * by, text: `${number(at * by)} ${unit}, ${states[i]}: ${number(total[i])} W, most of it ${most[0]} ${number(most[1])} W` };
  });
  readable(into, made, points, () => stack(into, { start, end, parts, mean, label, yLabel, states }));
}

// What a setting trades: a curve with the operating point on it, to drag or to move with the arrow keys.
export function tradeCurve(into, curve) {
  const { x, y, labels, at, xLabel, yLabel, label, onPick, notes = [] } = curve;
  const span = (values, room) => { const low = Math.min(...values), high = Math.max(...values), pad = high - low || high; return [Math.max(low - room * pad, 0), high + 0.08 * pad]; };
  const [xl, xh] = span(x, 0.08), [yl, yh] = span(y, 0.16);
  const made = frame(into, { x: { low: xl, high: xh, label: xLabel }, y: { low: yl, high: yh, label: yLabel }, height: 300, label, marks: true });
  const { root, layer, sx, sy } = made;
  layer.append(svg("path", { d: path(x, y, sx, sy), class: "line s0" }));
  for (const { index, text, css = "f2" } of notes) {
    layer.append(svg("circle", { cx: sx(x[index]), cy: sy(y[index]), r: 5, class: css }),
      svg("text", { x: sx(x[index]), y: sy(y[index]) + 20, "text-anchor": sx(x[index]) > into.clientWidth * 0.7 ? "end" : "middle", class: "halo" }, text));
  }
  let now = at;
  const ring = svg("circle", {
    r: 9, class: "ring s0 handle", tabindex: "0", role: "slider", "aria-label": label,
    "aria-valuemin": 0, "aria-valuemax": x.length - 1,
  });
  const said = svg("text", { class: "strong halo", "aria-hidden": "true" });
  const move = (index) => {
    now = Math.min(Math.max(index, 0), x.length - 1);
    ring.setAttribute("cx", sx(x[now])); ring.setAttribute("cy", sy(y[now]));
    ring.setAttribute("aria-valuenow", now); ring.setAttribute("aria-valuetext", labels[now]);
    const right = sx(x[now]) > into.clientWidth * 0.6;
    said.setAttribute("x", sx(x[now]) + (right ? -14 : 14)); said.setAttribute("y", sy(y[now]) - 12);
    said.setAttribute("text-anchor", right ? "end" : "start");
    said.textContent = labels[now];
  };
  const nearest = (event) => {
    const area = root.getBoundingClientRect();
    const px = event.clientX - area.left, py = event.clientY - area.top;
    const far = x.map((v, i) => (sx(v) - px) ** 2 + (sy(y[i]) - py) ** 2);
    return far.indexOf(Math.min(...far));
  };
  ring.addEventListener("pointerdown", (event) => { event.preventDefault(); ring.setPointerCapture(event.pointerId); ring.focus(); });
  ring.addEventListener("pointermove", (event) => { if (ring.hasPointerCapture(event.pointerId)) move(nearest(event)); });
  ring.addEventListener("pointerup", (event) => { ring.releasePointerCapture(event.pointerId); if (now !== at) onPick(now); });
  ring.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -5, PageUp: 5, Home: -1e3, End: 1e3 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    move(now + by);
    onPick(now);
  });
  move(now);
  readable(into, made, x.map((v, i) => ({ x: v, y: y[i], text: `${labels[i]}: ${number(v)} and ${number(y[i])}` })), () => tradeCurve(into, curve), false);
  layer.append(said, ring);
}

// Speed against arithmetic per byte, under the roofs of the pipes and the memories.
export function roofline(into, roof) {
  const { marks, roofs, memories, label } = roof;
  const xs = marks.map((m) => m.x), ys = marks.map((m) => m.y);
  const peak = Math.max(...Object.values(roofs), ...ys);
  const low = Math.min(0.3, ...xs) / 1.5, high = Math.max(3000, ...xs) * 1.5;
  const floor = Math.min(...ys, peak / 1e4) / 1.5;
  const made = frame(into, {
    x: { low, high, log: true, label: "Arithmetic per byte asked for (FLOP/B)" }, y: { low: floor / 1e12, high: (peak * 2) / 1e12, log: true, label: "Speed (TFLOP/s)" }, height: 300, label,
  });
  const { layer: root, sx, sy, box } = made;
  const best = Math.max(...Object.values(roofs));
  for (const [name, rate] of Object.entries(memories)) {
    const from = Math.max(low, floor / rate), knee = best / rate;
    if (knee <= from) continue;
    root.append(svg("path", { d: path([from, knee], [(from * rate) / 1e12, best / 1e12], sx, sy), class: name === "DRAM" ? "line s0" : "line s0 dashed" }),
      svg("text", { x: sx(from ** 0.8 * knee ** 0.2) + (name === "DRAM" ? 8 : -6), y: sy((from ** 0.8 * knee ** 0.2 * rate) / 1e12) + (name === "DRAM" ? 12 : -4), "text-anchor": name === "DRAM" ? "start" : "end", class: "halo" }, name));
  }
  const knee = best / Math.max(...Object.values(memories));
  for (const [name, rate] of Object.entries(roofs)) {
    root.append(svg("path", { d: path([rate === best ? knee : rate / Math.max(...Object.values(memories)), high], [rate / 1e12, rate / 1e12], sx, sy), class: rate === best ? "line s0" : "line s0 thin" }),
      svg("text", { x: box.right, y: sy(rate / 1e12) - 8, "text-anchor": "end", class: "halo" }, `${name}, ${number(rate / 1e12)}`));
  }
  const named = []; // marks that lie on one another share a label beside them
  for (const m of [...marks].sort((a, b) => b.share - a.share)) {
    const cx = sx(m.x), cy = sy(m.y / 1e12), r = 4 + 22 * Math.sqrt(m.share);
    root.append(svg("circle", { cx, cy, r, class: "mark" }));
    if (!m.mark) continue;
    const near = named.find((n) => Math.hypot(n.cx - cx, n.cy - cy) < n.r + 8);
    if (near) near.marks.push(m.mark); else named.push({ cx, cy, r, marks: [m.mark] });
  }
  for (const { cx, cy, r, marks: all } of named) {
    const right = cx + r + 50 < box.right;
    root.append(svg("text", { x: right ? cx + r + 4 : cx - r - 4, y: cy + 4, "text-anchor": right ? "start" : "end", class: "strong halo" }, all.sort().join(" ")));
  }
  const points = [...marks].sort((a, b) => a.x - b.x).map((m) => ({ x: m.x, y: m.y / 1e12, text: `${m.mark} ${m.name}: ${number(m.x)} FLOP/B, ${number(m.y / 1e12)} TFLOP/s` }));
  readable(into, made, points, () => roofline(into, roof));
}

// Lines, bands, dots and levels over a common axis, with a cursor that reads them.
export function lines(into, shown) {
  const { series = [], dots = [], bands = [], levels = [], x, yLabel, height = 220, label, unit = "" } = shown;
  const all = [...series.flatMap((s) => s.y), ...dots.map((d) => d[1]), ...bands.map((b) => b.high), ...levels.map((l) => l.y)];
  const high = (all.reduce((a, b) => Math.max(a, b), 0) || 1) * 1.08;
  const made = frame(into, { x, y: { low: 0, high, label: yLabel }, height, label }), { layer: root, sx, sy, box } = made;
  for (const band of bands) root.append(svg("rect", { x: box.left, width: box.right - box.left, y: sy(band.high), height: Math.max(sy(band.low) - sy(band.high), 1), class: `band f${band.k}` }));
  for (const s of series) {
    if (s.fill) root.append(svg("path", { d: `${path(s.x, s.y, sx, sy)}V${sy(0)}H${sx(s.x[0])}Z`, class: `band f${s.k}` }));
    root.append(svg("path", { d: path(s.x, s.y, sx, sy), class: `line s${s.k}${s.dashed ? " dashed" : ""}` }, svg("title", {}, s.name)));
  }
  for (const level of levels) {
    root.append(svg("line", { x1: box.left, x2: box.right, y1: sy(level.y), y2: sy(level.y), class: "mean" }),
      svg("text", { x: box.right - 2, y: Math.min(sy(level.y) + 34, box.bottom - 6), "text-anchor": "end", class: "strong halo" }, level.text));
  }
  for (const [dx, dy] of dots) root.append(svg("circle", { cx: sx(dx), cy: sy(dy), r: 2.4, class: "dot" }));
  if (!series.length || !series[0].x.length || !unit) return;
  const points = series[0].x.map((v, i) => ({ x: v, text: `${number(v)} ${shown.xUnit || "s"}: ${series.map((s) => `${s.name} ${number(s.y[i])}${unit}`).join(", ")}` }));
  readable(into, made, points, () => lines(into, shown));
}

// Points to choose from, with the front that none of them beats.
export function choices(into, choice) {
  const { points, front, chosen, kinds, x, y, label, onPick } = choice;
  const made = frame(into, { x, y, height: 320, label, marks: true }), { layer: root, sx, sy } = made;
  if (front.length > 1) root.append(svg("path", { d: path(front.map((p) => p.x), front.map((p) => p.y), sx, sy), class: "line front" }));
  const pick = (index) => { onPick(index); into.querySelector(`[data-index="${index}"]`)?.focus(); };
  points.forEach((point, index) => {
    const k = kinds.indexOf(point.kind) % 4, cx = sx(point.x) + 9 * (k - (kinds.length - 1) / 2), cy = sy(point.y), r = index === chosen ? 9 : 6;
    const shape = [`M${cx - r} ${cy}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`, `M${cx - r} ${cy - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
      `M${cx} ${cy - r * 1.2}L${cx + r * 1.1} ${cy + r}H${cx - r * 1.1}Z`, `M${cx} ${cy - r * 1.3}L${cx + r * 1.3} ${cy}L${cx} ${cy + r * 1.3}L${cx - r * 1.3} ${cy}Z`][k];
    root.append(svg("path", {
      d: shape, class: `pick f${k}${index === chosen ? " chosen" : ""}`, tabindex: index === chosen ? "0" : "-1", role: "button", "data-index": index,
      "aria-label": point.name, "aria-pressed": String(index === chosen), onclick: () => pick(index),
      onkeydown: (event) => {
        const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
        if (by || event.key === "Enter" || event.key === " ") { event.preventDefault(); pick((index + (by || 0) + points.length) % points.length); }
      },
    }));
  });
  readable(into, made, points.map((p) => ({ x: p.x, y: p.y, text: p.name })), () => choices(into, choice), false);
}

// Bars about zero, or from zero: rows are {name, value, text, css}.
export function bars(into, rows, label) {
  const width = Math.max(into.clientWidth || 600, 260), each = 34, height = rows.length * each + 4;
  const low = Math.min(0, ...rows.map((r) => r.value)), high = Math.max(0, ...rows.map((r) => r.value)), span = high - low || 1;
  const side = 74, room = width - (low < 0 ? side : 0) - side;
  const sx = (v) => (low < 0 ? side : 0) + ((v - low) / span) * room;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  rows.forEach((row, i) => {
    const y = i * each, a = Math.min(sx(0), sx(row.value)), b = Math.max(sx(0), sx(row.value));
    root.append(svg("text", { x: 0, y: y + 12, class: row.soft ? "soft" : "" }, row.name),
      svg("rect", { x: a, y: y + 17, width: Math.max(b - a, 1), height: 12, rx: 2, class: row.css }),
      svg("text", { x: row.value < 0 ? a - 5 : b + 5, y: y + 27, "text-anchor": row.value < 0 ? "end" : "start", class: "strong" }, row.text));
  });
  if (low < 0) root.append(svg("line", { x1: sx(0), x2: sx(0), y1: 0, y2: height, class: "axis" }));
  into.replaceChildren(root);
}

// Shares of a whole in one bar: parts are {name, value, text, css}.
export function shareBar(into, parts, label) {
  const total = parts.reduce((sum, p) => sum + p.value, 0) || 1, width = Math.max(into.clientWidth || 600, 260);
  const root = svg("svg", { viewBox: `0 0 ${width} 22`, height: 22, role: "img", "aria-label": label });
  let left = 0;
  for (const part of parts) {
    const wide = (part.value / total) * width;
    root.append(svg("rect", { x: left, y: 0, width: Math.max(wide - 1.5, 0), height: 20, rx: 2, class: part.css }, svg("title", {}, `${part.name}: ${part.text}`)));
    left += wide;
  }
  const names = element("div", { class: "legend" });
  legend(names, parts.filter((p) => p.value > 0).map((p) => [`${p.name} ${p.text}`, p.css]));
  into.replaceChildren(root, names);
}
