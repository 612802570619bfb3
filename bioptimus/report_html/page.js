"use strict";
(() => {
  const body = document.querySelector("#slides tbody");
  const find = document.getElementById("find");
  const sortBy = document.getElementById("sort-by");
  const chips = [...document.querySelectorAll(".chip")];
  const heads = [...document.querySelectorAll("th button[data-sort]")];
  const rows = [...body.querySelectorAll("tr.slide")].map((main, place) => {
    const values = {};
    for (const cell of main.cells) values[cell.classList[0]] = cell.dataset.v;
    const open = main.querySelector("button.open");
    const detail = main.nextElementSibling;
    return { main, detail, open, place, values, words: main.dataset.words, state: main.dataset.state };
  });
  const numeric = new Set(["state", "tiles", "failed", "mpp", "speed", "seconds"]);

  const show = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const states = chips.filter((c) => c.getAttribute("aria-pressed") === "true").map((c) => c.dataset.state);
    let count = 0;
    for (const row of rows) {
      const fits = (!states.length || states.includes(row.state)) && words.every((w) => row.words.includes(w));
      row.main.hidden = !fits;
      row.detail.hidden = !fits || row.open.getAttribute("aria-expanded") !== "true";
      count += fits;
    }
    const all = rows.length.toLocaleString("en");
    document.getElementById("shown").textContent =
      count === rows.length ? `${all} slides` : `${count.toLocaleString("en")} of ${all} slides`;
    document.getElementById("nothing").hidden = count > 0 || !rows.length;
  };

  const compare = (key, sign) => (a, b) => {
    const x = a.values[key], y = b.values[key];
    // What is not known stays last in either direction.
    if (x === undefined || y === undefined) {
      return (x === undefined) - (y === undefined) || a.place - b.place;
    }
    const order = numeric.has(key) ? Number(x) - Number(y) : x.localeCompare(y, "en", { numeric: true });
    return sign * order || a.place - b.place;
  };

  const sort = (key, direction) => {
    const sign = direction === "descending" ? -1 : 1;
    const parts = document.createDocumentFragment();
    for (const row of [...rows].sort(compare(key, sign))) parts.append(row.main, row.detail);
    body.append(parts);
    for (const head of heads) {
      head.closest("th").setAttribute("aria-sort", head.dataset.sort === key ? direction : "none");
    }
    sortBy.value = key;
  };

  const toggle = (row) => {
    const opening = row.open.getAttribute("aria-expanded") !== "true";
    row.open.setAttribute("aria-expanded", String(opening));
    row.detail.hidden = !opening;
    const large = row.detail.querySelector(".large");
    if (opening && !large.childElementCount) {
      for (const image of row.main.querySelectorAll(".pair img")) large.append(image.cloneNode());
    }
  };

  const clear = () => {
    find.value = "";
    for (const chip of chips) chip.setAttribute("aria-pressed", "false");
    show();
  };

  find.addEventListener("input", show);
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
      show();
    });
  }
  for (const head of heads) {
    head.addEventListener("click", () => {
      const now = head.closest("th").getAttribute("aria-sort");
      // Large figures are what one looks for first; names and states run upwards.
      const first = numeric.has(head.dataset.sort) && head.dataset.sort !== "state" ? "descending" : "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      sort(head.dataset.sort, now === first ? other : first);
    });
  }
  sortBy.addEventListener("change", () => {
    const key = sortBy.value;
    sort(key, numeric.has(key) && key !== "state" ? "descending" : "ascending");
  });
  for (const row of rows) row.open.addEventListener("click", () => toggle(row));
  document.getElementById("clear").addEventListener("click", clear);

  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
    if (event.key === "/" && !typing) {
      event.preventDefault();
      find.focus();
    } else if (event.key === "Escape") {
      clear();
    } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && document.activeElement.tagName !== "SELECT") {
      const opens = [...body.querySelectorAll("tr.slide:not([hidden]) button.open")];
      if (!opens.length) return;
      const at = opens.indexOf(document.activeElement);
      if (at < 0 && event.key === "ArrowUp") return;
      const next = opens[at + (event.key === "ArrowDown" ? 1 : -1)] || (at > 0 ? opens[at] : null);
      event.preventDefault();
      (next || find).focus();
    }
  });

  const state = document.querySelector('th [data-sort="state"]');
  if (state) state.closest("th").setAttribute("aria-sort", "ascending");
  sortBy.value = "state";
  show();
})();
