// What axe asks for beyond the theme: landmarks with names of their own, and wide parts that scroll by keyboard.
function mend() {
  document.querySelectorAll("nav.md-code__nav, nav.md-nav[data-md-level='1']").forEach((nav, number) => {
    const title = document.getElementById(nav.getAttribute("aria-labelledby"))?.textContent.trim() ?? "Code";
    if (!nav.ariaLabel) nav.ariaLabel = `${title} ${number + 1}`;
    nav.removeAttribute("aria-labelledby");
  });
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) wide.tabIndex = 0;
}
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
mend();
