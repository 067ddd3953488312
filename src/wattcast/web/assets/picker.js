// A list to search by typing: grouped options with their key facts (the combobox pattern of ARIA 1.2).
import { element } from "/assets/format.js";

export class Picker {
  // ``input`` stands in the page with its label; ``list()`` gives [{value, text, group, facts}], ``onPick`` is told the value.
  // ``onTyped`` takes a name that is not in the list, such as a Hugging Face id, and says whether it may be one.
  constructor(input, list, onPick, onTyped = () => false) {
    this.onTyped = onTyped;
    this.input = input;
    this.list = list;
    this.onPick = onPick;
    this.shown = [];
    this.at = -1;
    this.box = element("div", { id: `${input.id}-list`, class: "options", role: "listbox", "aria-label": input.labels[0].textContent, hidden: true });
    input.after(this.box);
    for (const [key, value] of Object.entries({ role: "combobox", "aria-expanded": "false", "aria-controls": this.box.id, "aria-autocomplete": "list", autocomplete: "off", spellcheck: "false" })) input.setAttribute(key, value);
    input.addEventListener("focus", () => { input.select(); });
    input.addEventListener("click", () => this.open(""));
    input.addEventListener("input", () => this.open(input.value));
    input.addEventListener("blur", () => this.close());
    input.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("pointerdown", (event) => event.preventDefault()); // the input keeps the focus
  }

  show(text) {
    this.text = text;
    if (document.activeElement !== this.input || this.box.hidden) this.input.value = text;
  }

  open(typed) {
    const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
    this.shown = this.list().filter((o) => words.every((w) => `${o.value} ${o.text} ${o.group} ${o.facts}`.toLowerCase().includes(w)));
    const groups = new Map();
    this.shown.forEach((option, index) => {
      if (!groups.has(option.group)) groups.set(option.group, element("div", { role: "group", "aria-label": option.group }, element("div", { class: "group", "aria-hidden": "true" }, option.group)));
      groups.get(option.group).append(element("div", { role: "option", id: `${this.box.id}-${index}`, "aria-selected": "false", onclick: () => this.pick(index) },
        element("b", {}, option.text), element("span", {}, option.facts)));
    });
    this.box.replaceChildren(...(groups.size ? groups.values() : [element("p", { role: "option", "aria-disabled": "true", "aria-selected": "false" }, `Nothing is called "${typed}".`)]));
    this.box.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
    this.mark(words.length ? 0 : this.shown.findIndex((o) => o.text === this.text));
  }

  close() {
    this.box.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
    this.input.removeAttribute("aria-activedescendant");
    this.input.value = this.text;
  }

  mark(index) {
    this.at = Math.min(index, this.shown.length - 1);
    for (const option of this.box.querySelectorAll("[role=option][id]")) option.setAttribute("aria-selected", "false");
    const now = this.at >= 0 && this.box.querySelector(`#${CSS.escape(`${this.box.id}-${this.at}`)}`);
    if (!now) { this.input.removeAttribute("aria-activedescendant"); return; }
    now.setAttribute("aria-selected", "true");
    this.input.setAttribute("aria-activedescendant", now.id);
    this.box.scrollTop = Math.max(0, now.offsetTop - this.box.clientHeight / 2);
  }

  pick(index) {
    const option = this.shown[index];
    if (!option) return;
    this.text = option.text;
    this.close();
    this.onPick(option.value);
  }

  key(event) {
    if (event.key === "Escape" && !this.box.hidden) { event.preventDefault(); this.close(); return; }
    if (["ArrowDown", "ArrowUp"].includes(event.key)) {
      event.preventDefault();
      if (this.box.hidden) this.open("");
      else this.mark((this.at + (event.key === "ArrowDown" ? 1 : -1) + this.shown.length) % (this.shown.length || 1));
    }
    if (event.key === "Enter") { event.preventDefault(); if (this.box.hidden) return; if (this.shown.length) this.pick(Math.max(this.at, 0)); else if (this.onTyped(this.input.value.trim())) this.close(); }
  }
}
