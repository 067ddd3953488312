// What the page shows, the link that restores it, and the way back. The link holds it after the '#', which no server sees.
export const MOST = 4;
export const MOST_KINDS = 8; // kinds of GPU of a plan, each a question of its own
const LINK_BYTES = 12000; // an uploaded file larger than this does not travel in a link
const MOST_UNDO = 60;

export const DEFAULTS = {
  batch: 1, seq: null, tokens: null, phase: null, dtype: "bf16", attention: "flash", head: null, stack: null, tp: 1, weights: null,
  kv_dtype: null, quantization: null, sampling: null, image: null, clock_hz: null, power_limit_w: null, host_launch_s: null, temperature_c: null, data: "random",
};
export const BY_KIND = {
  language: { batch: 16, seq: 1024, tokens: 256, phase: "generate", stack: "engine" },
  encoder: { batch: 32, seq: 256, tokens: null, phase: null, stack: null },
  vision: { batch: 64, seq: null, tokens: null, phase: null, stack: null },
};
export const PRESETS = {
  chat: { kind: "language", model: "llama3-8b", tab: "predict", set: { batch: 16, seq: 1024, tokens: 256 } },
  documents: { kind: "language", model: "qwen2.5-7b", tab: "predict", set: { batch: 4, seq: 16384, tokens: 512 }, needs: 16896 },
  batch: { kind: "language", model: "llama3-8b", tab: "predict", set: { batch: 256, seq: 512, tokens: 256 } },
  training: { kind: "language", model: "llama3-8b", tab: "train", set: {} },
  pictures: { kind: "vision", model: "vit-large", tab: "predict", set: { batch: 64 } },
};
const ASIDE = {
  plan: { gpus: ["h200", "h100-sxm", "l40s"], rate_per_s: 50, ttft_s: 0.5, tpot_s: 0.05, percentile: 99, minimise: "gpus", headroom: 0.1, site_power_w: null, pools: null },
  sim: { rate_per_s: 8, seconds: 120, replicas: 1, arrivals: "poisson", ttft_s: null, tpot_s: null, concurrency: null, shared_prefix: null, prefix_hit_rate: null, speculative_tokens: null, acceptance_rate: null, draft: null },
  train: { gpus: 8, tokens: 1e9, seq: null, precision: "bf16", lora: 0, minimise: "time" },
  hall: { system: "dgx-h200", serving_racks: 12, training_racks: 6, idle_racks: 2, rate_per_s: 4, day: "office", limit_w: null, around_s: null },
  money: { price_per_h: 2, electricity_per_kwh: null },
};
export const PHASES = { language: ["generate", "prefill", "decode", "train", "forward"], encoder: ["prefill", "forward", "train"], vision: ["forward", "train"], list: [] };
export const TABS = ["predict", "compare", "plan", "simulate", "train", "hall", "live", "gpus"];

export const fresh = () => ({
  tab: "predict", configs: [{ model: "llama3-8b", gpu: "h200", ...BY_KIND.language }], selected: 0, ...structuredClone(ASIDE),
});

export let state = fresh();
const before = [];
let lastChange = { name: "", at: 0 };

export const config = () => state.configs[state.selected];

export function replaceState(next) { state = next; }

// Remember what was, then change it; quick changes of the same thing are one step back.
export function commit(name, change) {
  const now = performance.now();
  if (name !== lastChange.name || now - lastChange.at > 900) {
    before.push(structuredClone(state));
    if (before.length > MOST_UNDO) before.shift();
  }
  lastChange = { name, at: now };
  change(state);
}

export function undo() {
  if (!before.length) return false;
  state = before.pop();
  lastChange = { name: "", at: 0 };
  return true;
}
export const canUndo = () => before.length > 0;

// ---- requests: only what differs from the default is sent, so that a link stays short and answers are remembered ----

const money = () => Object.fromEntries(Object.entries(state.money).filter(([, v]) => v !== null));
const source = (c) => (c.file ? { file: { name: c.file.name, content: c.file.content } } : { model: c.model });

function plainConfig(c) {
  const asked = { gpu: c.gpu, ...source(c) };
  for (const [key, usual] of Object.entries(DEFAULTS)) {
    if (c[key] !== undefined && c[key] !== usual && !(isList(c) && !/_|^data$/.test(key))) asked[key] = c[key];
  }
  if (asked.phase && asked.phase !== "generate") delete asked.tokens; // only whole answers have a length
  return asked;
}
export const viewRequest = (c) => ({ ...plainConfig(c), ...money() });

export function roomRequest(c) {
  const asked = plainConfig(c);
  for (const key of ["clock_hz", "power_limit_w", "temperature_c", "host_launch_s", "data"]) delete asked[key];
  return asked;
}

export const kernelRequest = (c, kernel) => ({ ...plainConfig(c), kernel });

function serving(c) {
  const asked = { ...source(c), ...money(), prompt: c.seq ?? 512, output: c.tokens ?? 128 };
  for (const key of ["dtype", "weights", "kv_dtype", "sampling"]) if (c[key] && c[key] !== DEFAULTS[key]) asked[key] = c[key];
  return asked;
}
const given = (plain) => Object.fromEntries(Object.entries(plain).filter(([, v]) => v !== null && v !== undefined));

export const planRequest = (c, gpu, minimise = state.plan.minimise) => ({ ...serving(c), ...given(state.plan), gpus: [gpu], minimise });

export function simulateRequest(c) {
  const { trace, ...plain } = state.sim;
  const asked = { ...serving(c), ...given(plain), gpu: c.gpu, tp: c.tp ?? 1, ...given({ clock_hz: c.clock_hz, power_limit_w: c.power_limit_w }) };
  if (trace) { asked.trace = trace.text; asked.trace_name = trace.name; delete asked.rate_per_s; }
  return asked;
}
export const trainRequest = (c) => ({ ...source(c), ...money(), gpu: c.gpu, ...given(state.train), ...given({ clock_hz: c.clock_hz, power_limit_w: c.power_limit_w }) });

export const hallRequest = (c) => ({ ...source(c), tp: c.tp ?? 1, prompt: c.seq ?? 512, output: c.tokens ?? 128, ...given(state.hall) });

export function isList(c) {
  const content = c.file && c.file.content;
  return Boolean(content) && (Array.isArray(content) || "ops" in content || "traceEvents" in content);
}

// ---- links

export function toLink() {
  let left = false;
  const configs = state.configs.map((c) => {
    const asked = plainConfig(c);
    if (asked.file && JSON.stringify(asked.file).length > LINK_BYTES) { left = true; asked.file = null; asked.lost = c.file.name; }
    return asked;
  });
  const plain = { v: 2, t: state.tab, c: configs, s: state.selected };
  for (const [name, usual] of Object.entries(ASIDE)) {
    const changed = Object.entries(state[name]).filter(([key, v]) => key !== "trace" && JSON.stringify(v) !== JSON.stringify(usual[key]));
    if (changed.length) plain[name] = Object.fromEntries(changed);
  }
  let text = "";
  for (const byte of new TextEncoder().encode(JSON.stringify(plain))) text += String.fromCharCode(byte);
  return { hash: btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", ""), left };
}

// ---- links that one can read: /plan?model=llama3-8b&gpu=h200,b200&rate=20

const SHORT = { rate: "rate_per_s", prompt: "seq", output: "tokens", price: "price_per_h", electricity: "electricity_per_kwh", clock: "clock_hz", power_limit: "power_limit_w", ttft: "ttft_s", tpot: "tpot_s" };
const LONG = Object.fromEntries(Object.entries(SHORT).map(([short, long]) => [long, short]));
const SCALE = { us: 1e-6, ms: 1e-3, s: 1, min: 60, MHz: 1e6, GHz: 1e9, W: 1, kW: 1e3, "%": 0.01, "/s": 1, B: 1e9, M: 1e6, "/h": 1 };
const ASIDE_OF = { plan: "plan", simulate: "sim", train: "train", hall: "hall" };

// The address of this page where words can hold it: one configuration, no file, and nothing changed on other tabs.
export function toAddress() {
  const c = state.configs[0], own = ASIDE_OF[state.tab];
  const others = Object.keys(ASIDE).filter((name) => name !== own && name !== "money");
  const changed = (name) => Object.entries(state[name]).filter(([key, v]) => key !== "trace" && JSON.stringify(v) !== JSON.stringify(ASIDE[name][key]));
  if (state.configs.length > 1 || c.file || c.lost || others.some((name) => changed(name).length)) return null;
  const words = new URLSearchParams({ model: c.model });
  if (state.tab !== "plan") words.set("gpu", c.gpu);
  const usual = { ...DEFAULTS, ...fresh().configs[0] };
  for (const key of Object.keys(DEFAULTS)) {
    const value = c[key] ?? DEFAULTS[key];
    if (value !== (usual[key] ?? null)) words.set(LONG[key] || key, value ?? "");
  }
  for (const name of [own, "money"].filter(Boolean)) {
    for (const [key, value] of changed(name)) {
      if (key === "gpus" && name === "plan") continue;
      words.set(name === "train" && key in DEFAULTS ? `train.${key}` : LONG[key] || key, value ?? "");
    }
  }
  if (state.tab === "plan") words.set("gpu", state.plan.gpus.join(","));
  return `/${state.tab}?${words.toString().replaceAll("%2C", ",").replaceAll("%2F", "/").replaceAll("%3A", ":")}`;
}

function readWord(text) {
  if (text === "") return null;
  const match = /^([\d.]+(?:e[+-]?\d+)?) ?(us|ms|s|min|MHz|GHz|W|kW|%|\/s|\/h|B|M)?$/.exec(text);
  return match ? Number((Number(match[1]) * (SCALE[match[2]] ?? 1)).toPrecision(12)) : text;
}

export function fromAddress(path, search) {
  const tab = path.slice(1);
  if (!TABS.includes(tab) && !search) return null;
  const made = fresh(), c = made.configs[0], own = ASIDE_OF[tab];
  if (TABS.includes(tab)) made.tab = tab;
  for (const [word, text] of new URLSearchParams(search)) {
    const key = SHORT[word] || word, value = readWord(text);
    const [room, inner] = key.split(".");
    if (inner && Object.values(ASIDE_OF).includes(room) && inner in ASIDE[room]) made[room][inner] = value;
    else if (key === "gpu" && made.tab === "plan") made.plan.gpus = text.split(",").filter(Boolean).slice(0, MOST_KINDS);
    else if (key === "model" || key === "gpu") c[key] = text;
    else if (own && key in ASIDE[own] && key !== "gpus" && !(key in DEFAULTS && own !== "train")) made[own][key] = value;
    else if (own === "train" && key === "gpus") made.train.gpus = value;
    else if (key in DEFAULTS) c[key] = value ?? DEFAULTS[key];
    else if (key in ASIDE.money) made.money[key] = value;
  }
  return made;
}

export function fromLink(hash) {
  // A link comes from anyone: take only what has the right shape, and let the server judge the values.
  if (!hash) return null;
  try {
    const text = atob(hash.replaceAll("-", "+").replaceAll("_", "/"));
    const plain = JSON.parse(new TextDecoder().decode(Uint8Array.from(text, (c) => c.charCodeAt(0))));
    if (![1, 2].includes(plain.v) || !Array.isArray(plain.c) || !plain.c.length) return null;
    const made = fresh();
    made.configs = plain.c.slice(0, MOST).map((asked) => {
      const c = { model: "llama3-8b", gpu: "h200" };
      for (const key of ["model", "gpu", ...Object.keys(DEFAULTS)]) if (["string", "number"].includes(typeof asked[key])) c[key] = asked[key];
      if (asked.file && typeof asked.file.name === "string" && asked.file.content && typeof asked.file.content === "object") c.file = { name: asked.file.name, content: asked.file.content };
      if (typeof asked.lost === "string") c.lost = asked.lost;
      return c;
    });
    made.selected = Number.isInteger(plain.s) ? Math.min(Math.max(plain.s, 0), made.configs.length - 1) : 0;
    made.tab = TABS.includes(plain.t) ? plain.t : plain.c.length > 1 ? "compare" : "predict";
    for (const [name, usual] of Object.entries(ASIDE)) {
      for (const key of Object.keys(usual)) {
        const value = plain[name]?.[key];
        const fits = key === "gpus" && name === "plan" ? Array.isArray(value) && value.length && value.every((v) => typeof v === "string") : value === null || ["string", "number"].includes(typeof value);
        if (value !== undefined && fits) made[name][key] = key === "gpus" && name === "plan" ? value.slice(0, MOST_KINDS) : value;
      }
    }
    return made;
  } catch {
    return null;
  }
}
