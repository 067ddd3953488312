// What the page shows, and the link that restores it. The link holds it after the '#', which no server sees.
export const MOST = 4;
export const LINK_BYTES = 12000; // an uploaded file larger than this does not travel in a link

export const DEFAULTS = {
  batch: 1, seq: null, tokens: null, phase: null, dtype: "bf16", attention: "flash", head: null, stack: null,
  tp: 1, clock_hz: null, power_limit_w: null, host_launch_s: null, temperature_c: null, data: "random",
};

export const fresh = () => ({ model: "llama3-8b", gpu: "h200", batch: 8, seq: 1024 });

export function request(config) {
  // Only what differs from the default is sent, so that a link stays short and an answer can be remembered.
  const asked = { gpu: config.gpu };
  if (config.file) asked.file = { name: config.file.name, content: config.file.content };
  else asked.model = config.model;
  for (const [key, usual] of Object.entries(DEFAULTS)) {
    if (config[key] !== undefined && config[key] !== usual) asked[key] = config[key];
  }
  return asked;
}

export function isList(config) {
  const content = config.file && config.file.content;
  return Boolean(content) && (Array.isArray(content) || "ops" in content || "traceEvents" in content);
}

export function toLink(state) {
  let left = false;
  const kept = state.configs.map((config) => {
    const asked = request(config);
    if (asked.file && JSON.stringify(asked.file).length > LINK_BYTES) {
      left = true;
      asked.file = null;
      asked.lost = config.file.name;
    }
    return asked;
  });
  const bytes = new TextEncoder().encode(JSON.stringify({ v: 1, c: kept, s: state.selected }));
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  const hash = btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return { hash, left };
}

export function fromLink(hash) {
  // A link comes from anyone: take only what has the right shape, and let the server judge the values.
  if (!hash) return null;
  try {
    const text = atob(hash.replaceAll("-", "+").replaceAll("_", "/"));
    const plain = JSON.parse(new TextDecoder().decode(Uint8Array.from(text, (c) => c.charCodeAt(0))));
    if (plain.v !== 1 || !Array.isArray(plain.c) || !plain.c.length) return null;
    const configs = plain.c.slice(0, MOST).map((asked) => {
      const config = { ...fresh(), batch: 1, seq: null };
      for (const key of ["model", "gpu", ...Object.keys(DEFAULTS)]) {
        const value = asked[key];
        if (["string", "number"].includes(typeof value)) config[key] = value;
      }
      if (asked.file && typeof asked.file.name === "string" && typeof asked.file.content === "object") {
        config.file = { name: asked.file.name, content: asked.file.content };
      }
      if (typeof asked.lost === "string") config.lost = asked.lost;
      return config;
    });
    const selected = Number.isInteger(plain.s) ? Math.min(Math.max(plain.s, 0), configs.length - 1) : 0;
    return { configs, selected };
  } catch {
    return null;
  }
}
