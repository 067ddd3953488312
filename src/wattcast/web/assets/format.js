// Numbers with the unit prefix that reads best (SI inside, as everywhere), and elements made of text.
const PREFIX = {
  s: [[3600, "h"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]],
  W: [[1e6, "MW"], [1e3, "kW"], [1, "W"], [1e-3, "mW"]],
  J: [[1e6, "MJ"], [1e3, "kJ"], [1, "J"], [1e-3, "mJ"], [1e-6, "µJ"]],
  Hz: [[1e9, "GHz"], [1e6, "MHz"]],
  byte: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]],
  "byte/s": [[1e12, "TB/s"], [1e9, "GB/s"]],
  "FLOP/s": [[1e15, "PFLOP/s"], [1e12, "TFLOP/s"], [1e9, "GFLOP/s"]],
  Wh: [[1e6, "GWh"], [1e3, "MWh"], [1, "kWh"], [1e-3, "Wh"]], // of kWh
  "": [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1, ""]],
};

export function scale(value, unit) {
  return PREFIX[unit].find(([least]) => Math.abs(value) >= least * 0.9995) || PREFIX[unit].at(-1);
}

export function number(value, digits = 3) {
  if (!Number.isFinite(value)) return "unknown";
  const rounded = Number(value.toPrecision(digits));
  return Math.abs(rounded) >= 10 ** (digits - 1)
    ? rounded.toLocaleString("en", { maximumFractionDigits: 0 })
    : rounded.toLocaleString("en", { maximumSignificantDigits: digits });
}

export function show(value, unit, digits = 3) {
  if (!Number.isFinite(value)) return "unknown";
  const [by, name] = scale(value, unit);
  return `${number(value / by, digits)}${name.startsWith(" ") || !name ? name : ` ${name}`}`;
}

// As many digits as the interval deserves, by the rule of the command line.
export function digitsOf(value, [low, high]) {
  const half = value > 0 ? (high - low) / 2 / value : 1;
  return half >= 0.05 ? 2 : half >= 0.005 ? 3 : 4;
}

// Joules of a token or a picture stay in joules down to a thousandth, as on the command line.
export const showJoules = (value, digits = 3) => (value >= 1e-3 && value < 1e3 ? `${number(value, digits)} J` : show(value, "J", digits));

export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;

export function money(value, currency = "USD") {
  const sign = currency === "USD" ? "$" : "";
  if (!Number.isFinite(value)) return "unknown";
  const text = value >= 100 ? number(value, 3) : value >= 0.1 ? value.toFixed(2) : number(value, 2);
  return sign + text;
}

export function element(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...inside.flat().filter((piece) => piece !== null && piece !== undefined && piece !== false));
  return made;
}

export function table(head, rows, caption) {
  const cell = (text, i) => (i ? element("td", {}, text) : element("th", { scope: "row" }, text));
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {},
      element("caption", { class: "hidden" }, caption),
      element("thead", {}, element("tr", {}, head.map((h) => element("th", { scope: "col" }, h)))),
      element("tbody", {}, rows.map((row) => element("tr", {}, row.map(cell))))));
}

// The numbers behind a chart, for those who read rather than look.
export function numbers(into, head, rows, caption) {
  const open = into.querySelector("details")?.open;
  into.replaceChildren(element("details", { open }, element("summary", {}, "The numbers"), table(head, rows, caption)));
}

export const $ = (id) => document.getElementById(id);
