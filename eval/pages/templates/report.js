"use strict";
// Filters. Without this script, the page still shows all rows, cards and charts.
(() => {
  const PAGE = 12;
  for (const form of document.querySelectorAll(".filters")) {
    const section = form.closest("section");
    const cards = [...section.querySelectorAll(".cards .card")];
    const more = section.querySelector(".more");
    let limit = PAGE;
    const shown = form.querySelector("output");
    const text = new Map(cards.map((card) => [card, card.textContent.toLowerCase()]));
    const show = () => {
      const wanted = [...form.querySelectorAll("select")].filter((s) => s.value);
      const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = cards.filter((card) =>
        wanted.every((s) => card.dataset[s.name] === s.value)
        && words.every((word) => text.get(card).includes(word)));
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
})();
