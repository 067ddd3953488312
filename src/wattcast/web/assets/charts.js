// Charts as plain SVG: stacked bars, stacked time, lines. Colours come from classes, so that themes need no redraw.
const NS = "http://www.w3.org/2000/svg";

function svg(name, attributes = {}, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function canvas(into, height, label) {
  const width = Math.max(into.clientWidth || 600, 240);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  into.replaceChildren(root);
  return [root, width];
}

export function ticks(low, high, wanted = 5) {
  const span = high - low || 1;
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => span / s <= wanted) || 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9 * step; at += step) found.push(at);
  return found;
}

const short = (value) => Number(value.toPrecision(4)).toString();
const moduleClass = (name) => `m-${/^[a-z0-9]+$/.test(name) ? name : "other"}`;

export function legend(into, names) {
  into.replaceChildren(...names.map((name) => {
    const mark = svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
    mark.append(svg("rect", { width: 10, height: 10, class: moduleClass(name) }));
    const item = document.createElement("span");
    item.append(mark, name);
    return item;
  }));
}

export function stackedBars(into, rows, parts, label) {
  const bar = 18, gap = 9, text = 15, top = 4;
  const height = top + rows.length * (bar + gap + text) + 34;
  const [root, width] = canvas(into, height, label);
  const most = Math.max(...rows.map((row) => row.watts.reduce((a, b) => a + b, 0)), 1);
  const x = (watts) => (watts / most) * (width - 2);
  const foot = height - 30;
  for (const at of ticks(0, most, Math.max(4, Math.floor(width / 110)))) {
    root.append(svg("line", { x1: x(at), x2: x(at), y1: top, y2: foot, class: "grid" }));
    const anchor = at === 0 ? "start" : x(at) > width - 18 ? "end" : "middle";
    root.append(svg("text", { x: x(at), y: foot + 13, "text-anchor": anchor, class: "soft" }, short(at)));
  }
  rows.forEach((row, index) => {
    const y = top + index * (bar + gap + text);
    root.append(svg("text", { x: 0, y: y + 11, class: row.strong ? "" : "soft" }, row.label));
    let left = 0;
    row.watts.forEach((watts, part) => {
      if (watts <= 0) return;
      const rect = svg("rect", { x: x(left), y: y + text, width: Math.max(x(watts), 0.4), height: bar, class: moduleClass(parts[part]) });
      rect.append(svg("title", {}, `${row.label}: ${parts[part]} ${short(watts)} W`));
      root.append(rect);
      left += watts;
    });
  });
  root.append(svg("text", { x: width, y: height - 2, "text-anchor": "end", class: "soft" }, "Power (W)"));
}

function frame(root, width, height, xs, ys, xLabel, yLabel) {
  const box = { left: 44, right: width - 8, top: 16, bottom: height - 34 };
  const x = (v) => box.left + ((v - xs[0]) / (xs[1] - xs[0] || 1)) * (box.right - box.left);
  const y = (v) => box.bottom - ((v - ys[0]) / (ys[1] - ys[0] || 1)) * (box.bottom - box.top);
  for (const at of ticks(ys[0], ys[1], 5)) {
    root.append(svg("line", { x1: box.left, x2: box.right, y1: y(at), y2: y(at), class: "grid" }));
    root.append(svg("text", { x: box.left - 5, y: y(at) + 4, "text-anchor": "end", class: "soft" }, short(at)));
  }
  for (const at of ticks(xs[0], xs[1], Math.max(4, Math.floor(width / 100)))) {
    root.append(svg("line", { x1: x(at), x2: x(at), y1: box.bottom, y2: box.bottom + 4, class: "axis" }));
    root.append(svg("text", { x: x(at), y: box.bottom + 17, "text-anchor": "middle", class: "soft" }, short(at)));
  }
  root.append(svg("path", { d: `M${box.left} ${box.top}V${box.bottom}H${box.right}`, class: "axis" }));
  root.append(svg("text", { x: box.right, y: height - 2, "text-anchor": "end", class: "soft" }, xLabel));
  root.append(svg("text", { x: 0, y: 10, class: "soft" }, yLabel));
  return { x, y, box };
}

export function stackedTime(into, trace, parts, mean, by, unit, label) {
  const height = 250;
  const [root, width] = canvas(into, height, label);
  const edges = trace.edge_s.map((t) => t / by);
  const totals = trace.waiting.map((_, step) => trace.part_w.reduce((sum, row) => sum + row[step], 0));
  const most = Math.max(...totals, mean) * 1.04;
  const { x, y, box } = frame(root, width, height, [edges[0], edges[edges.length - 1]], [0, most], `Time (${unit})`, "Power (W)");
  let below = totals.map(() => 0);
  trace.part_w.forEach((row, part) => {
    const top = below.map((w, step) => w + row[step]);
    if (row.some((w) => w > 0)) {
      let d = `M${x(edges[0])} ${y(below[0])}`;
      top.forEach((w, step) => { d += `V${y(w)}H${x(edges[step + 1])}`; });
      for (let step = top.length - 1; step >= 0; step -= 1) d += `V${y(below[step])}H${x(edges[step])}`;
      const path = svg("path", { d: `${d}Z`, class: moduleClass(parts[part]) });
      path.append(svg("title", {}, parts[part]));
      root.append(path);
    }
    below = top;
  });
  trace.waiting.forEach((share, step) => {
    if (share > 0.02) {
      const strip = svg("rect", { x: x(edges[step]), y: box.bottom + 1, width: Math.max((x(edges[step + 1]) - x(edges[step])) * share, 0.6), height: 4, class: "wait" });
      root.append(strip);
    }
  });
  root.append(svg("line", { x1: box.left, x2: box.right, y1: y(mean), y2: y(mean), class: "mean" }));
}

export function lines(into, { series = [], dots = [], bands = [], xLabel, yLabel, label, height = 230, zeroX = false }) {
  const [root, width] = canvas(into, height, label);
  const allX = [...series.flatMap((s) => s.x), ...dots.map((d) => d[0])];
  const allY = [...series.flatMap((s) => s.y), ...dots.map((d) => d[1]), ...bands.flatMap((b) => [b.high])];
  if (!allX.length) allX.push(0, 1);
  if (!allY.length) allY.push(0, 1);
  const reduce = (values, pick) => values.reduce((a, b) => pick(a, b), values[0]);
  const xs = [zeroX ? 0 : reduce(allX, Math.min), reduce(allX, Math.max)];
  if (xs[1] <= xs[0]) xs[1] = xs[0] + 1;
  const { x, y, box } = frame(root, width, height, xs, [0, (reduce(allY, Math.max) || 1) * 1.06], xLabel, yLabel);
  for (const band of bands) {
    root.append(svg("rect", { x: box.left, width: box.right - box.left, y: y(band.high), height: Math.max(y(band.low) - y(band.high), 1), class: `band f${band.k}` }));
  }
  for (const s of series) {
    const d = s.x.map((v, i) => `${i ? "L" : "M"}${x(v).toFixed(1)} ${y(s.y[i]).toFixed(1)}`).join("");
    const path = svg("path", { d, class: `line s${s.k}` });
    path.append(svg("title", {}, s.name));
    root.append(path);
    if (s.at) root.append(svg("circle", { cx: x(s.at[0]), cy: y(s.at[1]), r: 5, class: `ring s${s.k}` }));
  }
  for (const [dx, dy] of dots) root.append(svg("circle", { cx: x(dx), cy: y(dy), r: 2.4, class: "dot" }));
}
