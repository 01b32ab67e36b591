// Before anything is painted: sections become pages of their own only where a script can turn them.
document.documentElement.classList.add("js");
