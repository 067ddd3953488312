// Charts as plain SVG. Colours come from classes, so that themes need no redraw; nothing moves by itself.
import { element, number } from "/assets/format.js";

const NS = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...inside) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
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

// A frame with axes. ``x`` and ``y`` are {low, high, label, log, whole}; returns scales and the layer to draw into.
export function frame(into, { x, y, height = 260, label, marks }) {
  const width = Math.max(into.clientWidth || 600, 260);
  const box = { left: 52, right: width - 10, top: 24, bottom: height - 38 };
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: marks ? "group" : "img", "aria-label": label });
  const place = (axis, from, to) => {
    const f = axis.log ? Math.log10 : (v) => v;
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
  root.append(svg("path", { d: `M${box.left} ${box.bottom}H${box.right}`, class: "axis" }),
    svg("text", { x: box.right, y: height - 4, "text-anchor": "end", ...soft }, x.label),
    svg("text", { x: 2, y: 13, ...soft }, y.label));
  into.replaceChildren(root);
  return { root, sx, sy, box, width };
}

export const path = (xs, ys, sx, sy) => xs.map((v, i) => `${i ? "L" : "M"}${sx(v).toFixed(1)} ${sy(ys[i]).toFixed(1)}`).join("");

export function legend(into, items) {
  into.replaceChildren(...items.map(([name, css]) => element("span", {},
    svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { width: 10, height: 10, rx: 2, class: css })), name)));
}
export const moduleLegend = (into, names) => legend(into, names.map((name) => [name, moduleClass(name)]));

// Where the power goes: a column per operator, as wide as its time and as high as its power, so that area is energy.
export function powerArea(into, columns, parts, mean, label) {
  const total = columns.reduce((sum, c) => sum + c.seconds, 0);
  const most = Math.max(mean, ...columns.map((c) => c.watts.reduce((a, b) => a + b, 0))) * 1.05;
  const { root, sx, sy, box } = frame(into, {
    x: { low: 0, high: 100, label: "Share of the time (%)" }, y: { low: 0, high: most, label: "Power of one GPU (W)" }, height: 340, label,
  });
  let left = 0;
  columns.forEach((column, index) => {
    const right = left + (100 * column.seconds) / total;
    let below = 0;
    const group = svg("g", { class: "column", "data-index": index });
    column.watts.forEach((watts, part) => {
      if (watts <= 0) return;
      group.append(svg("rect", {
        x: sx(left), width: Math.max(sx(right) - sx(left) - 1.5, 0.5), y: sy(below + watts), height: Math.max(sy(below) - sy(below + watts), 0.2),
        class: moduleClass(parts[part]),
      }, svg("title", {}, `${column.name}: ${parts[part]} ${number(watts)} W`)));
      below += watts;
    });
    if (sx(right) - sx(left) > 16) group.append(svg("text", { x: (sx(left) + sx(right)) / 2, y: Math.max(sy(below) - 5, box.top - 2), "text-anchor": "middle", class: "strong" }, column.mark));
    root.append(group);
    left = right;
  });
  root.append(svg("line", { x1: box.left, x2: box.right, y1: sy(mean), y2: sy(mean), class: "mean" }),
    svg("text", { x: box.left + 4, y: sy(mean) - 5, class: "strong halo" }, `mean ${number(mean)} W`));
}

// What a setting trades: a curve with the operating point on it, to drag or to move with the arrow keys.
export function tradeCurve(into, { x, y, labels, at, xLabel, yLabel, label, onPick, notes = [] }) {
  const span = (values, room) => { const low = Math.min(...values), high = Math.max(...values), pad = high - low || high; return [Math.max(low - room * pad, 0), high + 0.08 * pad]; };
  const [xl, xh] = span(x, 0.08), [yl, yh] = span(y, 0.16);
  const { root, sx, sy } = frame(into, { x: { low: xl, high: xh, label: xLabel }, y: { low: yl, high: yh, label: yLabel }, height: 300, label, marks: true });
  root.append(svg("path", { d: path(x, y, sx, sy), class: "line s0" }));
  for (const { index, text, css = "f2" } of notes) {
    root.append(svg("circle", { cx: sx(x[index]), cy: sy(y[index]), r: 5, class: css }),
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
  root.append(said, ring);
}

// Speed against arithmetic per byte, under the roofs of the pipes and the memories.
export function roofline(into, { marks, roofs, memories, label }) {
  const xs = marks.map((m) => m.x), ys = marks.map((m) => m.y);
  const peak = Math.max(...Object.values(roofs), ...ys);
  const low = Math.min(0.3, ...xs) / 1.5, high = Math.max(3000, ...xs) * 1.5;
  const floor = Math.min(...ys, peak / 1e4) / 1.5;
  const { root, sx, sy, box } = frame(into, {
    x: { low, high, log: true, label: "Arithmetic per byte asked for (FLOP/B)" }, y: { low: floor / 1e12, high: (peak * 2) / 1e12, log: true, label: "Speed (TFLOP/s)" }, height: 300, label,
  });
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
    root.append(svg("circle", { cx, cy, r, class: "mark" }, svg("title", {}, m.name)));
    if (!m.mark) continue;
    const near = named.find((n) => Math.hypot(n.cx - cx, n.cy - cy) < n.r + 8);
    if (near) near.marks.push(m.mark); else named.push({ cx, cy, r, marks: [m.mark] });
  }
  for (const { cx, cy, r, marks: all } of named) {
    const right = cx + r + 50 < box.right;
    root.append(svg("text", { x: right ? cx + r + 4 : cx - r - 4, y: cy + 4, "text-anchor": right ? "start" : "end", class: "strong halo" }, all.sort().join(" ")));
  }
}

// Lines, bands, dots and levels over a common axis, with a cursor that reads them.
export function lines(into, { series = [], dots = [], bands = [], levels = [], x, yLabel, height = 220, label, unit = "" }) {
  const all = [...series.flatMap((s) => s.y), ...dots.map((d) => d[1]), ...bands.map((b) => b.high), ...levels.map((l) => l.y)];
  const high = (all.reduce((a, b) => Math.max(a, b), 0) || 1) * 1.08;
  const { root, sx, sy, box } = frame(into, { x, y: { low: 0, high, label: yLabel }, height, label });
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
  const rule = svg("line", { y1: box.top, y2: box.bottom, class: "rule" }), said = svg("text", { y: 13, "text-anchor": "end", x: box.right, class: "strong" });
  root.append(rule, said);
  root.addEventListener("pointermove", (event) => {
    const px = event.clientX - root.getBoundingClientRect().left;
    const xs = series[0].x, i = xs.reduce((best, v, k) => (Math.abs(sx(v) - px) < Math.abs(sx(xs[best]) - px) ? k : best), 0);
    rule.setAttribute("x1", sx(xs[i])); rule.setAttribute("x2", sx(xs[i])); rule.classList.add("on");
    said.textContent = `${number(xs[i])} s: ${series.map((s) => `${s.name} ${number(s.y[i])}${unit}`).join(", ")}`;
  });
  root.addEventListener("pointerleave", () => { rule.classList.remove("on"); said.textContent = ""; });
}

// Points to choose from, with the front that none of them beats.
export function choices(into, { points, front, chosen, kinds, x, y, label, onPick }) {
  const { root, sx, sy } = frame(into, { x, y, height: 320, label, marks: true });
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
    }, svg("title", {}, point.name)));
  });
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
