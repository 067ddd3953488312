// Numbers with the unit prefix that reads best; SI inside, as everywhere.
const PREFIX = {
  s: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]],
  W: [[1e3, "kW"], [1, "W"], [1e-3, "mW"]],
  J: [[1e6, "MJ"], [1e3, "kJ"], [1, "J"], [1e-3, "mJ"]],
  Hz: [[1e9, "GHz"], [1e6, "MHz"]],
  byte: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1, "B"]],
};

export function scale(value, unit) {
  const found = PREFIX[unit].find(([least]) => Math.abs(value) >= least * 0.9995);
  return found || PREFIX[unit][PREFIX[unit].length - 1];
}

export function show(value, unit, digits = 4) {
  const [by, name] = scale(value, unit);
  const number = value / by;
  return `${number.toLocaleString("en", { maximumSignificantDigits: digits, useGrouping: false })} ${name}`;
}

export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;

export function element(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...inside.filter((piece) => piece !== null && piece !== undefined));
  return made;
}
