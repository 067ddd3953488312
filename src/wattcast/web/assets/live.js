// Measured points on the axes of the prediction: dots are measured, the line and its band are predicted.
import { lines } from "/assets/charts.js";

const WINDOW_S = 60;

export class Live {
  constructor(chosen) {
    this.chosen = chosen; // () => {view, k, name} of the selected configuration, or null
    this.points = [];
    this.source = null;
    this.about = null;
    this.due = false;
    for (const part of ["power", "clock", "energy"]) this[part] = document.getElementById(`live-${part}`);
    this.button = document.getElementById("live-start");
    this.button.addEventListener("click", () => (this.source ? this.stop() : this.start()));
  }

  async load() {
    const answer = await fetch("/api/live/about");
    if (!answer.ok) return;
    this.about = await answer.json();
    const about = this.about;
    const what = about.recorded ? "A recorded run" : "This machine's GPU";
    const where = [about.device, about.date].filter(Boolean).join(", ");
    document.getElementById("live-about").textContent = `${what}: ${about.title}${where ? ` (${where})` : ""}. Dots are measured, the line is the selected configuration's prediction for work that repeats without end.`;
    document.getElementById("live-same").hidden = !about.workload;
    this.draw();
  }

  start() {
    this.points = [];
    this.button.textContent = "Stop";
    this.source = new EventSource("/api/live");
    this.source.addEventListener("points", (event) => {
      this.points.push(...JSON.parse(event.data));
      const last = this.points[this.points.length - 1].time_s;
      if (last > WINDOW_S) this.points = this.points.filter((p) => p.time_s >= last - WINDOW_S);
      this.later();
    });
    this.source.addEventListener("end", () => this.stop());
    this.source.onerror = () => this.stop();
  }

  stop() {
    if (this.source) this.source.close();
    this.source = null;
    this.button.textContent = this.points.length ? "Again" : "Start";
    this.draw();
  }

  later() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => { this.due = false; this.draw(); });
  }

  draw() {
    const chosen = this.chosen();
    const of = (key, by) => this.points.filter((p) => p[key] !== undefined).map((p) => [p.time_s, p[key] / by]);
    const power = of("power_w", 1), clock = of("clock_hz", 1e6), energy = of("energy_j", 1);
    const end = Math.max(this.points.length ? this.points[this.points.length - 1].time_s : 0, this.about?.duration_s || 3);
    const start = this.points.length ? Math.min(this.points[0].time_s, end) : 0;
    const level = (value, by) => (chosen ? [{ name: chosen.name, k: chosen.k, x: [start, end], y: [value / by, value / by] }] : []);
    const v = chosen && chosen.view;
    lines(this.power, {
      series: level(v?.power_w, 1), dots: power, xLabel: "Time (s)", yLabel: "Power (W)", zeroX: start < 1,
      bands: v ? [{ low: v.interval.power_w[0], high: v.interval.power_w[1], k: chosen.k }] : [],
      label: `Measured power over time, ${power.length} points`,
    });
    lines(this.clock, {
      series: level(v?.clock_hz, 1e6), dots: clock, xLabel: "Time (s)", yLabel: "Clock (MHz)", zeroX: start < 1, height: 150,
      label: `Measured clock over time, ${clock.length} points`,
    });
    const slope = chosen && energy.length
      ? [{ name: chosen.name, k: chosen.k, x: [energy[0][0], end], y: [energy[0][1], energy[0][1] + v.power_w * (end - energy[0][0])] }]
      : [];
    lines(this.energy, {
      series: slope, dots: energy, xLabel: "Time (s)", yLabel: "Energy (J)", zeroX: start < 1, height: 150,
      label: `Measured energy over time, ${energy.length} points`,
    });
  }
}
