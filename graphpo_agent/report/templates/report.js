"use strict";
(() => {
  const svgNamespace = "http://www.w3.org/2000/svg";
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;

  /* rows: [name, text, css class of the row] */
  function show(rows, event) {
    tip.replaceChildren(...rows.map(([name, text, kind]) => {
      const row = document.createElement("div");
      row.className = kind;
      const left = row.appendChild(document.createElement("span"));
      if (/^c\d$/.test(kind)) left.appendChild(document.createElement("i"));
      left.append(name);
      row.appendChild(document.createElement("span")).textContent = text;
      return row;
    }));
    tip.hidden = false;
    const gap = 14, box = tip.getBoundingClientRect();
    const right = event.clientX + gap + box.width < innerWidth;
    const x = right ? event.clientX + gap : Math.max(8, event.clientX - gap - box.width);
    const y = Math.min(event.clientY + gap, innerHeight - box.height - 8);
    tip.style.left = `${x}px`;
    tip.style.top = `${Math.max(8, y)}px`;
  }

  function element(name, attributes) {
    const made = document.createElementNS(svgNamespace, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  function nearest(values, target) {
    let best = 0;
    values.forEach((value, i) => {
      if (Math.abs(value - target) < Math.abs(values[best] - target)) best = i;
    });
    return best;
  }

  document.querySelectorAll("svg.chart").forEach((chart) => {
    const lines = JSON.parse(chart.dataset.points);
    const [, top, , bottom] = chart.dataset.box.split(" ").map(Number);
    const overlay = chart.appendChild(element("g", {}));
    function leave() {
      overlay.replaceChildren();
      tip.hidden = true;
    }
    chart.addEventListener("pointermove", (event) => {
      const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
      const all = lines.flatMap((line) => line.x);
      const at = all[nearest(all, x)];
      overlay.replaceChildren(element("line", { class: "cross", x1: at, x2: at, y1: top, y2: bottom }));
      const rows = [];
      lines.forEach((line, i) => {
        const j = nearest(line.x, at);
        if (Math.abs(line.x[j] - at) > 0.5) return;
        if (!rows.length) rows.push(["step", line.step[j], ""]);
        overlay.appendChild(element("circle", { class: `mark c${i}`, cx: line.x[j], cy: line.y[j], r: 4 }));
        rows.push([line.label, line.value[j], `c${i}`]);
      });
      show(rows, event);
    });
    chart.addEventListener("pointerleave", leave);
  });

  document.querySelectorAll(".g-drawing").forEach((drawing) => {
    const edgeTo = new Map();
    drawing.querySelectorAll(".g-edge").forEach((edge) => edgeTo.set(edge.dataset.to, edge));
    function leave() {
      drawing.classList.remove("g-focused");
      drawing.querySelectorAll(".g-lit").forEach((lit) => lit.classList.remove("g-lit"));
      tip.hidden = true;
    }
    function light(node) {
      leave();
      drawing.classList.add("g-focused");
      drawing.querySelectorAll(`[data-class="${node.dataset.class}"]`).forEach((mate) => mate.classList.add("g-lit"));
      for (let at = node.dataset.node; edgeTo.has(at); at = edgeTo.get(at).dataset.from) {
        edgeTo.get(at).classList.add("g-lit");
        drawing.querySelector(`[data-node="${edgeTo.get(at).dataset.from}"]`).classList.add("g-lit");
      }
    }
    drawing.querySelectorAll(".g-node[data-node]").forEach((node) => {
      const title = node.querySelector("title");
      const rows = title.textContent.split("\n").map((line) => {
        const colon = line.indexOf(": ");
        const name = line.slice(0, colon);
        return [name, line.slice(colon + 2), ["key", "state", "text"].includes(name) ? "long" : ""];
      });
      node.setAttribute("aria-label", title.textContent);
      title.remove();
      node.addEventListener("pointerenter", (event) => { light(node); show(rows, event); });
      node.addEventListener("pointermove", (event) => show(rows, event));
      node.addEventListener("pointerleave", leave);
    });
  });
})();
