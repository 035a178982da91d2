// Tells the figures under the pointer, and opens every run for the printer. Nothing depends on it.
(() => {
  const box = document.createElement("div");
  box.className = "tip";
  box.hidden = true;
  document.body.append(box);
  const tell = (event) => {
    const text = event.target.closest?.("[data-tip]")?.getAttribute("data-tip");
    box.hidden = !text;
    if (!text) return;
    box.textContent = text;
    const width = document.documentElement.clientWidth;
    const left = Math.min(event.clientX + 12, width - box.offsetWidth - 8);
    box.style.left = Math.max(8, left) + "px";
    box.style.top = Math.max(8, event.clientY - box.offsetHeight - 12) + "px";
  };
  // Browsers show an image's title beside the pointer; its aria-label says the same.
  document.querySelectorAll("svg > title").forEach((title) => title.remove());
  document.addEventListener("pointermove", tell);
  document.addEventListener("pointerdown", tell);
  document.addEventListener("scroll", () => { box.hidden = true; }, { passive: true });

  const open = (details) => { if (details) details.open = true; };
  const openLinked = () => {
    const linked = location.hash && document.getElementById(location.hash.slice(1));
    if (linked?.tagName === "DETAILS") { open(linked); linked.scrollIntoView(); }
  };
  addEventListener("hashchange", openLinked);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(open));
  openLinked();
})();
