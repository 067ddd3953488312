// Measured points on the axes of the prediction: dots are measured, the line and its band are predicted.
import { lines } from "/assets/charts.js";
import { $ } from "/assets/format.js";

const WINDOW_S = 60;

export class Live {
  constructor(view) {
    Object.assign(this, { view, points: [], source: null, about: null, due: false });
    $("live-start").addEventListener("click", () => (this.source ? this.stop() : this.start()));
  }

  // Whether there is something to watch: a card of this machine, or a recording that was asked for.
  async load() {
    const answer = await fetch("/api/live/about");
    if (!answer.ok) return false;
    this.about = await answer.json();
    const { recorded, title, device, date, workload, shown } = this.about;
    const where = [device, date].filter(Boolean).join(", ");
    $("live-about").textContent = `${recorded ? "A recorded run" : "This machine's GPU"}: ${title}${where ? ` (${where})` : ""}. Dots are measured; the line and its band are the prediction for work that repeats without end.`;
    $("live-same").hidden = !workload;
    return shown;
  }

  start() {
    this.points = [];
    $("live-start").textContent = "Stop";
    this.source = new EventSource("/api/live");
    this.source.addEventListener("points", (event) => {
      this.points.push(...JSON.parse(event.data));
      const last = this.points.at(-1).time_s;
      if (last > WINDOW_S) this.points = this.points.filter((p) => p.time_s >= last - WINDOW_S);
      this.later();
    });
    this.source.addEventListener("end", () => this.stop());
    this.source.onerror = () => this.stop();
  }

  stop() {
    this.source?.close();
    this.source = null;
    $("live-start").textContent = this.points.length ? "Again" : "Start";
    this.draw();
  }

  later() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => { this.due = false; this.draw(); });
  }

  draw() {
    const p = this.view()?.prediction;
    const of = (key, by) => this.points.filter((point) => point[key] !== undefined).map((point) => [point.time_s, point[key] / by]);
    const power = of("power_w", 1), clock = of("clock_hz", 1e6), energy = of("energy_j", 1);
    const end = Math.max(this.points.at(-1)?.time_s || 0, this.about?.duration_s || 3), start = Math.min(this.points[0]?.time_s || 0, end);
    const x = { low: start < 1 ? 0 : start, high: end, label: "Time (s)" };
    const level = (value, by) => (p ? [{ name: p.name, k: 0, x: [x.low, end], y: [value / by, value / by] }] : []);
    const height = 240;
    lines($("live-power"), { series: level(p?.power_w, 1), dots: power, x, yLabel: "Power (W)", height, bands: p ? [{ low: p.interval.power_w[0], high: p.interval.power_w[1], k: 0 }] : [], label: `Measured power over time, ${power.length} points` });
    lines($("live-clock"), { series: level(p?.clock_hz, 1e6), dots: clock, x, yLabel: "Clock (MHz)", label: `Measured clock over time, ${clock.length} points` });
    const slope = p && energy.length ? [{ name: p.name, k: 0, x: [energy[0][0], end], y: [energy[0][1], energy[0][1] + p.power_w * (end - energy[0][0])] }] : [];
    lines($("live-energy"), { series: slope, dots: energy, x, yLabel: "Energy (J)", label: `Measured energy over time, ${energy.length} points` });
  }
}
