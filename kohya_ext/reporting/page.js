"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("chart-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const plots = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const marks = { saved: "good", skipped: "bad", spilled: "bad", resumed: "accent", stopped: "warn", "over-fitting": "warn" };
  const font = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";

  const short = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 10000) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
    return size < 0.001 ? value.toExponential().replace("e-", "e−") : String(+value.toPrecision(6));
  };
  const whole = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

  /** Returns a tick with as many decimals as the others. */
  const even = (tick, step) => {
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return decimals > 4 || Math.abs(tick) >= 10000 ? short(+tick.toPrecision(6)) : tick.toFixed(String(+step.toPrecision(3)).split(".")[1]?.length ?? 0);
  };
  const exact = (value) => (value == null ? "–" : short(+value.toPrecision(4)));

  /** Returns the data of a chart: its tables joined by step, which have a value or undefined for each step. */
  const joined = (chart) => (chart.tables.length > 1 ? uPlot.join(chart.tables) : chart.tables[0]);

  /** Returns the limits of the vertical axis for the visible values from low to high. */
  const limits = (chart, log) => (plot, low, high) => {
    if (low == null || high == null) return [0, 1];
    if (chart.maximum != null) high = Math.max(low, Math.min(high, chart.maximum));
    for (const level of chart.levels) high = Math.max(high, level.value);
    if (log) return uPlot.rangeLog(Math.min(low, high), high, 10, false);
    if (chart.from_zero) return [0, high * 1.08 || 1];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low >= 0 ? Math.max(low - margin, 0) : low - margin, high + margin];
  };

  const drawLevels = (chart) => (plot) => {
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = font.replace("12px", 11 * ratio + "px");
    ctx.textAlign = "right";
    ctx.textBaseline = "bottom";
    const labels = []; // [left, y] of each
    for (const level of chart.levels) {
      const y = Math.round(plot.valToPos(level.value, "y", true));
      if (y < bbox.top || y > bbox.top + bbox.height) continue;
      ctx.strokeStyle = ctx.fillStyle = colour(level.label === "GPU" ? "muted" : "warn");
      ctx.lineWidth = ratio;
      ctx.setLineDash([5 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      const text = level.label + " " + exact(level.value);
      const close = labels.filter((label) => Math.abs(label[1] - y) < 14 * ratio).map((label) => label[0] - 10 * ratio);
      const right = Math.min(bbox.left + bbox.width - 4 * ratio, ...close);
      const left = right - ctx.measureText(text).width;
      const stroke = ctx.fillStyle;
      ctx.fillStyle = colour("card") + "cc";
      ctx.fillRect(left - 3 * ratio, y - 16 * ratio, right - left + 6 * ratio, 15 * ratio);
      ctx.fillStyle = stroke;
      ctx.fillText(text, right, y - 2 * ratio);
      labels.push([left, y]);
    }
    ctx.setLineDash([]);
    const bottom = bbox.top + bbox.height;
    for (const mark of chart.marks) {
      ctx.fillStyle = colour(marks[mark.name]);
      for (const step of mark.steps) {
        const x = plot.valToPos(step, "x", true);
        if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
        ctx.beginPath();
        ctx.moveTo(x, bottom - 9 * ratio);
        ctx.lineTo(x - 4 * ratio, bottom - ratio);
        ctx.lineTo(x + 4 * ratio, bottom - ratio);
        ctx.fill();
      }
    }
    ctx.restore();
  };

  const series = (curve, log) => {
    const stroke = colour("c" + (curve.colour % 8));
    const faint = curve.style === "faint";
    return {
      label: curve.label,
      stroke: faint ? stroke + "59" : stroke,
      width: faint ? 1 : 1.75,
      fill: curve.style === "area" ? stroke + "40" : undefined,
      dash: curve.colour >= 8 ? [6, 3] : undefined,
      points: { show: (plot, index, first, last) => last - first < 60, size: 4 },
      value: (plot, value) => exact(value),
    };
  };

  const draw = (figure) => {
    const chart = charts[figure.dataset.chart], place = figure.querySelector(".plot");
    const log = Boolean(figure.querySelector(".log:checked"));
    const width = place.clientWidth, wide = figure.classList.contains("wide");
    const data = joined(chart);
    const axis = { stroke: colour("muted"), font, grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
    plots.get(figure)?.destroy();
    place.textContent = "";
    const last = data.map((values) => values.findLastIndex((value) => value != null));
    const plot = new uPlot(
      {
        width,
        height: innerWidth <= 640 ? (wide ? 240 : 200) : wide ? 320 : 230,
        padding: [10, 20, 0, 0],
        cursor: { y: false, sync: { key: "step", scales: ["x", null] }, points: { size: 7 } },
        legend: { markers: { width: 0, fill: (plot, index) => plot.series[index].stroke(plot, index) } },
        scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: limits(chart, log) } },
        axes: [
          { ...axis, grid: { show: false }, size: 30, gap: 6, incrs: whole, values: (plot, ticks) => ticks.map(short) },
          {
            ...axis,
            gap: 6,
            size: (plot, values) => 14 + 6.8 * Math.max(2, ...(values ?? []).map((text) => (text ?? "").length)),
            values: (plot, ticks, index, space, step) => ticks.map((tick) => (tick == null ? "" : log ? short(tick) : even(tick, step))),
          },
        ],
        series: [{ label: "step", value: (plot, value) => (value == null ? "–" : value.toLocaleString("en")) }, ...chart.curves.map((curve) => series(curve, log))],
        hooks: {
          draw: [drawLevels(chart)],
          setLegend: [(plot) => plot.legend.idxs.every((index) => index == null) && plot.setLegend({ idxs: last }, false)],
        },
      },
      data,
      place,
    );
    plot.setLegend({ idxs: last }, false);
    plots.set(figure, plot);
  };

  const figures = [...document.querySelectorAll("[data-chart]")];
  const drawAll = () => figures.forEach(draw);
  drawAll();
  dark.addEventListener("change", drawAll);
  const widths = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = plots.get(target.closest("figure"));
      if (plot && target.clientWidth !== plot.width) plot.setSize({ width: target.clientWidth, height: plot.height });
    }
  });
  for (const figure of figures) {
    widths.observe(figure.querySelector(".plot"));
    figure.querySelector(".log")?.addEventListener("change", () => draw(figure));
  }
  document.body.dataset.charts = figures.length;

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  }

  // The nav links to a section of a run that may be closed.
  const open = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  addEventListener("hashchange", open);
  open();

  const refresh = Number(document.body.dataset.refresh);
  if (!refresh) return;
  const details = [...document.querySelectorAll("details[data-key]")];
  try {
    const kept = JSON.parse(sessionStorage.getItem("open") || "[]");
    for (const each of details) each.open ||= kept.includes(each.dataset.key);
  } catch {}
  const zoomed = () => [...plots.values()].some((plot) => plot.scales.x.min > plot.data[0][0] || plot.scales.x.max < plot.data[0].at(-1));
  setInterval(() => {
    if (document.hidden || zoomed() || String(getSelection())) return;
    try {
      sessionStorage.setItem("open", JSON.stringify(details.filter((each) => each.open).map((each) => each.dataset.key)));
    } catch {}
    location.reload();
  }, refresh * 1000);
})();
