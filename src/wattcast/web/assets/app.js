// The page: questions -> state -> requests -> answers. Everything foreign becomes text, never markup.
import { clearComplaints, clearField, complain, markField, post, stopAll, tell } from "/assets/answer.js";
import { $, element, number, show } from "/assets/format.js";
import { Live } from "/assets/live.js";
import { Picker } from "/assets/picker.js";
import { currentView, drawCompare, drawPredict, drawWhy, onChange, predictSlot, refreshCompare } from "/assets/predict.js";
import { BY_KIND, DEFAULTS, MOST, MOST_KINDS, PHASES, PRESETS, TABS, canUndo, commit, config, fromAddress, fromLink, isList, replaceState, state, toAddress, toLink, undo, viewRequest } from "/assets/state.js";
import { drawGpus, drawHall, drawPlan, drawSimulate, drawTrain, hallSlot, onUsePlan, planWasAsked, runPlan, simulateSlot, takeTrace, trainSlot } from "/assets/verbs.js";

const MOST_FILE = 1_900_000;
let catalogue = { gpus: [], models: [] };
const live = new Live(currentView);
const gpuOf = (name) => catalogue.gpus.find((gpu) => gpu.name === name);
const modelOf = (name) => catalogue.models.find((model) => model.name === name);
const kindOf = (c) => (isList(c) ? "list" : c.file ? "language" : modelOf(c.model)?.kind || "language");

// ---- after every change: link, controls, answers

function changed() {
  showAddress();
  $("undo").disabled = !canUndo();
  fill();
  refresh();
}

const pathOf = (name) => (name === "predict" ? "/" : `/${name}`);
function showAddress() { history.replaceState(null, "", toAddress() || `${pathOf(state.tab)}#${toLink().hash}`); }

// A value that its field refuses is never asked about: the field says why, and what stands below is dimmed.
const refusedFields = new Set();
function checkControl(control) {
  const place = `field ${control.dataset.bind}`, shown = !control.closest("[hidden]");
  if (!shown || control.checkValidity()) { refusedFields.delete(place); clearField(place); }
  else { refusedFields.add(place); markField(place, control, explain(control)); }
  $("results").classList.toggle("refused", refusedFields.size > 0);
  return !refusedFields.has(place);
}
function explain(control) {
  const { min, max, step } = control, whole = step === "1" ? "a whole number" : "a number";
  if (control.type !== "number") return `Expected ${control.title || "another value"}.`;
  return `Expected ${whole}${min !== "" && max !== "" ? ` from ${number(Number(min), 9)} to ${number(Number(max), 9)}` : ""}.`;
}

function refresh() {
  const tab = state.tab;
  if (tab === "predict" || tab === "live") predictSlot.refresh();
  if (tab === "compare") refreshCompare();
  if (tab === "plan") { if (planWasAsked()) drawPlan(); else runPlan(); }
  if (tab === "simulate") { drawSimulate(); simulateSlot.refresh(); }
  if (tab === "train") { drawTrain(); trainSlot.refresh(); }
  if (tab === "hall") { drawHall(); hallSlot.refresh(); }
  if (tab === "gpus") drawGpus(catalogue.gpus);
  if (tab === "live") live.later();
}

function redraw() {
  ({ predict: drawPredict, compare: drawCompare, plan: drawPlan, simulate: drawSimulate, train: drawTrain, hall: drawHall, live: () => live.draw(), gpus: () => {} })[state.tab]();
}

// ---- tabs

function showTab() {
  if (state.tab === "live" && $("tab-live").hidden) state.tab = "predict";
  for (const name of TABS) {
    const on = name === state.tab;
    $(`tab-${name}`).setAttribute("aria-selected", String(on));
    $(`tab-${name}`).tabIndex = on ? 0 : -1;
    $(`p-${name}`).hidden = !on;
  }
  $("ask").hidden = state.tab === "gpus";
  document.title = `${$(`tab-${state.tab}`).textContent} \u00b7 Wattcast`;
}

function openTab(name, focus = false) {
  if (name === "compare" && state.configs.length < 2) { addConfiguration(); if (focus) $("tab-compare").focus(); return; }
  if (name !== state.tab) commit("tab", () => { state.tab = name; });
  clearComplaints();
  tell("");
  changed();
  if (focus) $(`tab-${name}`).focus();
  $(`tab-${name}`).scrollIntoView({ block: "nearest", inline: "nearest" });
}

function buildTabs() {
  for (const name of TABS) $(`tab-${name}`).addEventListener("click", () => openTab(name));
  document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const open = TABS.filter((name) => !$(`tab-${name}`).hidden), at = open.indexOf(state.tab);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: open.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    openTab(open[(to + open.length) % open.length], true);
  });
}

// ---- controls

const params = (n) => show(n, "").replace(" ", "");
const modelFacts = (m) => [`${params(m.parameters)} parameters`, `${show(2 * m.parameters, "byte")} in bf16`, m.context ? `${number(m.context, 6)} tokens` : null].filter(Boolean).join(" \u00b7 ");
const gpuFacts = (g) => [show(g.memory_byte, "byte"), show(g.byte_per_s, "byte/s"), g.flop_per_s ? show(g.flop_per_s, "FLOP/s") : "no tensor cores", show(g.limit_w, "W"), g.coefficients].join(" \u00b7 ");

function modelOptions() {
  const group = (m) => (m.kind === "vision" ? "Pictures" : m.kind === "encoder" ? "Texts and speech, read once"
    : m.parameters < 10e9 ? "Language, up to 10 B" : m.parameters < 40e9 ? "Language, 10 to 40 B" : "Language, above 40 B");
  const order = ["Language, up to 10 B", "Language, 10 to 40 B", "Language, above 40 B", "Texts and speech, read once", "Pictures"];
  return catalogue.models.map((m) => ({ value: m.name, text: m.name, group: group(m), facts: `${m.title} \u00b7 ${modelFacts(m)}`, size: m.parameters }))
    .sort((a, b) => order.indexOf(a.group) - order.indexOf(b.group) || a.text.localeCompare(b.text, "en", { numeric: true }));
}

function gpuOptions() {
  const names = { "data-centre": "Data centre", workstation: "Workstation and desktop", museum: "Museum" }, sure = ["measured", "calibrated", "forecast"];
  return [...catalogue.gpus].sort((a, b) => Object.keys(names).indexOf(a.use) - Object.keys(names).indexOf(b.use) || sure.indexOf(a.coefficients) - sure.indexOf(b.coefficients) || (b.flop_per_s || 0) - (a.flop_per_s || 0))
    .map((g) => ({ value: g.name, text: g.name, group: names[g.use], facts: gpuFacts(g) }));
}

function chooseModel(name) {
  commit("model", () => {
    const c = config(), was = kindOf(c);
    delete c.file; delete c.lost;
    c.model = name;
    if (kindOf(c) !== was) Object.assign(c, DEFAULTS, BY_KIND[kindOf(c)], { clock_hz: c.clock_hz ?? null, power_limit_w: c.power_limit_w ?? null });
  });
  changed();
}

function chooseGpu(name) {
  commit("gpu", () => Object.assign(config(), { gpu: name, clock_hz: null, power_limit_w: null }));
  changed();
}

function choosePreset(name) {
  const preset = PRESETS[name];
  commit(`preset ${name}`, () => {
    const c = config(), model = modelOf(c.model);
    const keep = !c.file && model?.kind === preset.kind && (model.context ?? Infinity) >= (preset.needs || 0);
    delete c.file; delete c.lost;
    Object.assign(c, DEFAULTS, BY_KIND[preset.kind], preset.set, { model: keep ? c.model : preset.model, tp: c.tp ?? 1 });
    if (preset.tab === "train" || ["train", "live", "gpus"].includes(state.tab) || preset.kind !== "language") state.tab = preset.tab;
  });
  clearComplaints();
  changed();
}

const presetNow = () => Object.keys(PRESETS).find((name) => {
  const p = PRESETS[name], c = config();
  if (p.tab === "train") return state.tab === "train";
  return state.tab !== "train" && kindOf(c) === p.kind && Object.entries(p.set).every(([key, value]) => c[key] === value);
});

const target = (path) => { const [where, key] = path.split("."); return [where === "config" ? config() : state[where], key]; };
let pickers = {};

function buildAsk() {
  pickers = {
    model: new Picker($("model"), modelOptions, chooseModel, (typed) => typed.includes("/") && (chooseModel(typed), true)), gpu: new Picker($("gpu"), gpuOptions, chooseGpu),
    plan: new Picker($("plan-gpu"), () => gpuOptions().filter((o) => !state.plan.gpus.includes(o.value)), (name) => {
      if (state.plan.gpus.length >= MOST_KINDS) { complain("plan", `At most ${MOST_KINDS} kinds of GPU: remove one first.`); return; }
      commit("plan gpus", () => { state.plan.gpus = [...state.plan.gpus, name]; });
      complain("plan", null);
      changed();
    }),
  };
  for (const button of document.querySelectorAll("[data-preset]")) button.addEventListener("click", () => choosePreset(button.dataset.preset));
  for (const control of document.querySelectorAll("[data-bind]")) {
    const path = control.dataset.bind, by = Number(control.dataset.by || 1);
    control.addEventListener(control.tagName === "SELECT" ? "change" : "input", () => {
      if (control.tagName !== "SELECT" && !checkControl(control)) return;
      commit(path, () => {
        const [into, key] = target(path);
        into[key] = control.value === "" ? null : control.tagName === "SELECT" || control.type === "text" ? control.value : Number((Number(control.value) * by).toPrecision(12));
        if (into[key] === null && ["batch", "tp", "dtype"].includes(key)) into[key] = DEFAULTS[key];
        if (key === "phase" && into.phase === "train" && into.stack === "engine") into.stack = "compiled"; // an engine only serves
        if (key === "phase" && into.phase === "generate") into.tokens ??= BY_KIND.language.tokens;
      });
      changed();
    });
  }
  for (const [id, key] of [["clock", "clock_hz"], ["limit", "power_limit_w"]]) {
    $(id).addEventListener("input", () => { commit(key, () => { config()[key] = Number($(id).value); }); changed(); });
    $(`${id}-free`).addEventListener("change", () => { commit(key, () => { config()[key] = $(`${id}-free`).checked ? null : Number($(id).value); }); changed(); });
  }
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); if (state.tab === "plan") runPlan(); });
  $("ask").addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target.matches("input[type=number]") && state.tab === "plan") { event.preventDefault(); runPlan(); } });
}

function fill() {
  showTab();
  const c = config(), gpu = gpuOf(c.gpu), model = modelOf(c.model), kind = kindOf(c), list = kind === "list";
  pickers.model?.show(c.file ? c.file.name : c.model);
  pickers.gpu?.show(c.gpu);
  pickers.plan?.show("");
  $("plan-gpu").placeholder = "Add a kind of GPU";
  $("model-facts").textContent = c.lost ? `This link could not carry ${c.lost}: drop it again.` : c.file ? "your own file" : model ? modelFacts(model) : "\u00a0";
  $("gpu-facts").textContent = state.tab === "plan" ? "Up to eight kinds; the best of each is found." : state.tab === "hall" ? "Four in a rack." : gpu ? gpuFacts(gpu) : "\u00a0";
  for (const one of document.querySelectorAll("[data-tabs]")) one.hidden = !one.dataset.tabs.split(" ").includes(state.tab);
  const serving = ["plan", "simulate", "hall"].includes(state.tab);
  const hide = (selector, when) => { for (const one of document.querySelectorAll(selector)) if (when) one.hidden = true; };
  hide("[data-text]", list || kind === "vision");
  hide("[data-answer]", list || (!serving && (kind !== "language" || (c.phase && c.phase !== "generate"))));
  hide("[data-picture]", kind !== "vision");
  $("batch-name").textContent = { vision: "Pictures", encoder: "Texts" }[kind] || (c.phase === "train" ? "Sequences" : "Requests");
  $("seq-name").textContent = c.phase === "train" || kind === "encoder" ? "Sequence" : c.phase === "decode" ? "Context" : "Prompt";
  $("batch").disabled = list;
  $("amount-facts").textContent = amountFacts(c, kind);
  for (const control of document.querySelectorAll("[data-bind]")) {
    if (document.activeElement === control && control.tagName !== "SELECT") continue;
    const [from, key] = target(control.dataset.bind), value = from[key] ?? (from === c ? DEFAULTS[key] : null);
    control.value = value === null || value === undefined ? "" : control.tagName === "SELECT" || control.type === "text" ? value : Number((value / Number(control.dataset.by || 1)).toPrecision(9));
  }
  for (const control of document.querySelectorAll("input[data-bind]")) checkControl(control);
  for (const option of document.querySelectorAll("[data-bind='config.phase'] option")) option.disabled = option.value !== "" && !PHASES[kind].includes(option.value);
  for (const button of document.querySelectorAll("[data-preset]")) button.setAttribute("aria-pressed", String(presetNow() === button.dataset.preset));
  $("plan-gpus").replaceChildren(...state.plan.gpus.map((name) => element("button", { type: "button", "aria-label": `Remove ${name}`, onclick: () => { commit("plan gpus", () => { state.plan.gpus = state.plan.gpus.filter((g) => g !== name); }); changed(); $("plan-gpu").focus(); } }, `${name} \u00d7`)));
  if (gpu) fillSliders(c, gpu);
  const price = state.money.price_per_h;
  $("money-note").textContent = price === 2 ? "$2 per GPU hour is an example: put your own price." : "";
}

function amountFacts(c, kind) {
  if (state.tab === "simulate") return state.sim.trace ? `the trace ${state.sim.trace.name}; a rate is not needed` : `about ${number(state.sim.rate_per_s * state.sim.seconds)} requests, drawn at random`;
  if (state.tab === "plan") return `bounds hold for ${number(state.plan.percentile, 4)} % of requests`;
  if (state.tab === "train") return `${number(state.train.tokens / 1e9)} billion tokens, ${state.train.precision}${state.train.lora ? `, LoRA ${state.train.lora}` : ""}`;
  if (state.tab === "hall") return `${c.tp ?? 1} GPU a copy`;
  if (kind === "list") return "as the file says";
  if (kind === "language" && c.phase === "generate") return `${number(c.batch, 6)} at once, ${number(c.batch * (c.tokens || 0), 7)} new tokens in a run`;
  return { train: "one optimiser step", decode: "one step of all requests", prefill: "prompts alone" }[c.phase] || "one pass";
}

function fillSliders(c, gpu) {
  const span = (id, low, high, step, value, unit, usual) => {
    Object.assign($(id), { min: low, max: high, step });
    $(id).value = value ?? usual;
    $(`${id}-free`).checked = value === null || value === undefined;
    const text = show(value ?? usual, unit);
    $(`${id}-said`).textContent = text;
    $(id).setAttribute("aria-valuetext", text);
  };
  const seen = currentView()?.prediction;
  span("clock", gpu.min_clock_hz, gpu.max_clock_hz, gpu.step_clock_hz || (gpu.max_clock_hz - gpu.min_clock_hz) / 100, c.clock_hz, "Hz", seen?.gpu === gpu.name ? seen.clock_hz : gpu.max_clock_hz);
  span("limit", gpu.min_limit_w, gpu.max_limit_w, 1, c.power_limit_w, "W", gpu.limit_w);
}

// ---- files in, files out

async function takeFile(file) {
  if (!file) return;
  if (/\.(csv|jsonl|ndjson)$/.test(file.name)) {
    if (await takeTrace(file)) { commit("trace", () => { state.tab = "simulate"; }); changed(); }
    return;
  }
  const refuse = (text) => { complain("file", text); tell(""); };
  if (file.size > MOST_FILE) { refuse(`${file.name}: expected at most ${MOST_FILE / 1e6} MB, got ${show(file.size, "byte")}.`); return; }
  let content;
  try { content = JSON.parse(await file.text()); } catch { refuse(`${file.name}: not valid JSON. Is the file complete?`); return; }
  if (content === null || typeof content !== "object") { refuse(`${file.name}: expected a JSON object or list.`); return; }
  const tried = { ...config(), file: { name: file.name, content } };
  delete tried.lost;
  try { await post("/api/view", viewRequest(tried)); } catch (error) { refuse(error.message); return; }
  commit("file", () => { state.configs[state.selected] = tried; if (!["predict", "compare"].includes(state.tab) && isList(tried)) state.tab = "predict"; });
  complain("file", null);
  tell(`${file.name} is read.`);
  changed();
}

function buildFiles() {
  for (const id of ["file", "trace-file"]) $(id).addEventListener("change", async () => { await takeFile($(id).files[0]); $(id).value = ""; });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", kind === "dragover");
      if (kind === "drop") takeFile(event.dataTransfer.files[0]);
    });
  }
  const save = async (path, body, name) => {
    try {
      const blob = await (await post(path, body)).blob();
      const link = element("a", { href: URL.createObjectURL(blob), download: name });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
      tell(`${name} is saved.`);
    } catch (error) { complain("save", error.message); }
  };
  const shown = () => (state.tab === "compare" ? [config(), ...state.configs.filter((c) => c !== config())] : [config()]);
  const all = () => ({ configurations: shown().map(viewRequest) });
  $("get-json").addEventListener("click", () => save("/api/predict", all(), "wattcast.json"));
  $("get-csv").addEventListener("click", () => save("/api/csv", all(), "wattcast.csv"));
  $("get-report").addEventListener("click", () => { tell("writing the report"); save("/api/report", all(), "wattcast-report.html"); });
  $("get-figure").addEventListener("click", () => { const figure = $("figure-name").value, format = $("figure-format").value; save("/api/figure", { ...all(), figure, format }, `wattcast-${figure}.${format}`); });
  $("share").addEventListener("click", async () => {
    const { left } = toLink();
    showAddress();
    const note = left || state.sim.trace ? " A file was too large for it." : "";
    try { await navigator.clipboard.writeText(location.href); tell(`The link is copied.${note}`); } catch { tell(`Copy it from here: ${location.href}${note}`); }
  });
}

// ---- the rest

function back() {
  if (!undo()) return;
  clearComplaints();
  changed();
  tell("One step back.");
}

function buildRest() {
  $("undo").addEventListener("click", back);
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "z" && !event.shiftKey && !event.target.matches("input:not([type=range]), textarea")) { event.preventDefault(); back(); }
    if (event.key === "Escape") $("menu").open = false;
  });
  document.addEventListener("click", (event) => { if (!$("menu").contains(event.target)) $("menu").open = false; });
  $("add").addEventListener("click", () => addConfiguration());
  $("to-compare").addEventListener("click", () => { if (state.configs.length < 2) addConfiguration(); else openTab("compare"); });
  $("to-plan").addEventListener("click", () => openTab("plan"));
  $("plan-go").addEventListener("click", runPlan);
  $("stop").addEventListener("click", stopAll);
  $("plan-axis").addEventListener("change", () => drawPlan());
  $("why-what").addEventListener("change", drawWhy);
  for (const id of ["gpu-find", "gpu-use"]) $(id).addEventListener("input", () => drawGpus(catalogue.gpus));
  $("live-same").addEventListener("click", () => {
    commit("same", () => { state.configs[state.selected] = { gpu: live.about.gpu || config().gpu, model: config().model, file: { name: "recorded.json", content: live.about.workload } }; });
    changed();
  });
  const set = (value) => { if (value) document.documentElement.dataset.theme = value; else delete document.documentElement.dataset.theme; };
  let kept = "";
  try { kept = localStorage.getItem("theme") || ""; } catch { /* storage may be closed */ }
  $("theme").value = kept;
  set(kept);
  $("theme").addEventListener("change", () => { set($("theme").value); try { localStorage.setItem("theme", $("theme").value); } catch { /* it then lasts as long as the page */ } });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  addEventListener("hashchange", () => { const linked = fromLink(location.hash.slice(1)); if (linked) { replaceState(linked); clearComplaints(); changed(); } });
  onChange(() => changed());
  onUsePlan(() => { clearComplaints(); changed(); });
}

function addSecond() {
  const other = { ...config(), clock_hz: null, power_limit_w: null }, names = state.configs.map((c) => c.gpu);
  other.gpu = ["h100-sxm", "b200", "l40s", "a100-sxm-80gb", "mi300x"].find((name) => !names.includes(name)) || other.gpu;
  state.configs.push(other);
  state.selected = state.configs.length - 1;
  state.tab = "compare";
}

function addConfiguration() {
  if (state.configs.length >= MOST) return;
  commit("add", addSecond);
  clearComplaints();
  changed();
  tell("Change its model, GPU or amount above.");
}

async function start() {
  const linked = fromLink(location.hash.slice(1)) || fromAddress(location.pathname, location.search), wanted = linked?.tab === "live";
  if (linked) replaceState(linked);
  if (state.tab === "compare" && state.configs.length < 2) addSecond();
  buildTabs();
  buildRest();
  buildFiles();
  fill();
  if (state.tab !== "gpus") refresh();
  try {
    const answer = await fetch("/api/catalogue");
    if (!answer.ok) throw new Error((await answer.json()).error);
    catalogue = await answer.json();
  } catch (error) { complain("catalogue", `The catalogue did not come: ${error.message}`); return; }
  buildAsk();
  fill();
  if (state.tab === "gpus") refresh();
  document.documentElement.dataset.ready = "";
  if (await live.load()) { $("tab-live").hidden = false; if (wanted) openTab("live"); }
}

start();
