// What the browser keeps for the page. Storage may be off or full: then a choice lasts as long as the page.

export function stored(area, name) {
  try {
    return area.getItem(name) ?? "";
  } catch {
    return "";
  }
}

/** Whether it is kept. */
export function store(area, name, value) {
  try {
    if (value) area.setItem(name, value);
    else area.removeItem(name);
    return true;
  } catch {
    return false;
  }
}
