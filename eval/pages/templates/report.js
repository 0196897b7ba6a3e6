"use strict";
// Filters and sorting. Without this script, the page still shows all rows, cards and charts.
(() => {
  const PAGE = 12;
  for (const form of document.querySelectorAll(".filters")) {
    const section = form.closest("section");
    const cards = [...section.querySelectorAll(".cards .card")];
    const more = section.querySelector(".more");
    let limit = PAGE;
    const shown = form.querySelector("output");
    const text = new Map(cards.map((card) => [card, card.textContent.toLowerCase()]));
    const runs = [...form.querySelectorAll(".one-run")];
    // With two runs chosen, a card shows these two, and the better of them wins it.
    const face = (card, pair) => {
      const lists = [...card.querySelectorAll(".duel > li")];
      for (const list of lists) list.hidden = pair.length === 2 && !pair.includes(list.dataset.run);
      if (pair.length < 2) return card.dataset.winner;
      const [a, b] = pair.map((run) => Number(lists.find((list) => list.dataset.run === run).dataset.place) || Infinity);
      return a === b ? (a === Infinity ? "none" : "tie") : pair[a < b ? 0 : 1];
    };
    const show = () => {
      const wanted = [...form.querySelectorAll("select:not(.one-run)")].filter((s) => s.value);
      const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
      const pair = [...new Set(runs.map((run) => run.value).filter(Boolean))];
      const fits = cards.filter((card) => {
        const winner = face(card, pair);
        return wanted.every((s) => (s.name === "winner" ? winner : card.dataset[s.name]) === s.value)
          && words.every((word) => text.get(card).includes(word));
      });
      const visible = new Set(fits.slice(0, limit));
      for (const card of cards) card.hidden = !visible.has(card);
      const rest = fits.length - visible.size;
      more.hidden = rest === 0;
      more.textContent = `Show ${Math.min(rest, PAGE)} more`;
      shown.textContent = fits.length
        ? `${visible.size} of ${fits.length} shown`
        : "No example matches.";
    };
    for (const kind of ["input", "change"]) form.addEventListener(kind, () => { limit = PAGE; show(); });
    form.addEventListener("submit", (event) => event.preventDefault());
    more.addEventListener("click", () => {
      const next = limit;
      limit += PAGE;
      show();
      const card = cards.filter((c) => !c.hidden)[next];
      if (card) card.focus({ preventScroll: true });
    });
    form.hidden = false;
    show();
  }

  const dialog = document.createElement("dialog");
  dialog.className = "enlarged";
  document.body.append(dialog);
  dialog.addEventListener("click", () => dialog.close());
  const enlarge = (picture) => {
    const large = picture.cloneNode(true);
    large.removeAttribute("tabindex");
    const words = document.createElement("p");
    words.textContent = picture.getAttribute("aria-label");
    dialog.replaceChildren(large, words);
    dialog.showModal();
  };
  for (const picture of document.querySelectorAll(".card .pic")) {
    picture.setAttribute("tabindex", "0");
    picture.addEventListener("click", () => enlarge(picture));
    picture.addEventListener("keydown", (event) => {
      if (event.key === "Enter") enlarge(picture);
    });
  }

  for (const form of document.querySelectorAll(".rowfilter")) {
    const table = form.parentElement.querySelector(".sortable");
    const bodies = [...table.tBodies].map((body) => {
      const rows = [...body.rows].filter((row) => row.dataset.kind);
      return { body, rows, at: new Map(rows.map((row, index) => [row, index])) };
    });
    const heads = [...table.tHead.rows[0].cells];
    const shown = form.querySelector("output");
    const startsLow = (column) => column < 2 || "lower" in heads[column].dataset;
    const filter = () => {
      const words = form.elements.model.value.toLowerCase().split(/\s+/).filter(Boolean);
      const kind = form.elements.kind.value;
      let count = 0, all = 0;
      for (const { rows } of bodies) for (const row of rows) {
        const name = row.querySelector("th").textContent.toLowerCase();
        row.hidden = !((!kind || row.dataset.kind === kind) && words.every((word) => name.includes(word)));
        count += !row.hidden;
        all += 1;
      }
      shown.textContent = count === all ? "" : `${count} of ${all} rows`;
    };
    // The first click sorts best first (ranks, names and errors: ascending), the second one reverses the order.
    const sort = (column, ascending) => {
      const key = (row) => {
        const cell = row.cells[column];
        return cell.dataset.sort === undefined ? cell.textContent.trim().toLowerCase() : Number(cell.dataset.sort);
      };
      for (const { body, rows, at } of bodies) {
        const found = rows.map((row) => [key(row), row]);
        const turn = ascending ? 1 : -1;
        found.sort(([a, x], [b, y]) => (a < b ? -turn : a > b ? turn : at.get(x) - at.get(y)));
        body.append(...found.map(([, row]) => row));
      }
      heads.forEach((head, index) => {
        if (index === column) head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        else head.removeAttribute("aria-sort");
      });
      const option = String(column);
      if ([...form.elements.by.options].some((one) => one.value === option)) form.elements.by.value = option;
    };
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const was = head.getAttribute("aria-sort");
        sort(column, was ? was === "descending" : startsLow(column));
      });
    });
    form.addEventListener("input", (event) => {
      if (event.target.name === "by") sort(Number(event.target.value), startsLow(Number(event.target.value)));
      else filter();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = false;
  }

  for (const form of document.querySelectorAll(".differs form")) {
    const table = form.parentElement.querySelector("table");
    const shown = form.querySelector("output");
    const show = () => {
      const pair = ["a", "b"].map((name) => Number(form.elements[name].value) + 1);
      let count = 0;
      for (const row of table.rows) {
        [...row.cells].forEach((cell, index) => { cell.hidden = index > 0 && !pair.includes(index); });
        if (row.parentElement === table.tHead) continue;
        row.hidden = row.cells[pair[0]].textContent === row.cells[pair[1]].textContent;
        count += !row.hidden;
      }
      shown.textContent = count ? "" : "None: two measurements of the same setup.";
    };
    form.addEventListener("change", show);
    form.hidden = false;
    show();
  }
})();
