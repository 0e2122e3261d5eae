// Values in units for people. The exact value is always beside them (see figures.js).
//
// The program has the same functions for its terminal (tools/units.rs), and a test compares the two.

const NONE = "–";

// Three digits, cut off rather than rounded, so that nothing is ever shown as "1000 kB".
const scaled = (value, base, units) => {
  let unit = 0;
  while (value >= base && unit + 1 < units.length) {
    value /= base;
    unit += 1;
  }
  const digits = unit === 0 && Number.isInteger(value) || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  const power = 10 ** digits;
  return (Math.floor(value * power + 1e-9) / power).toFixed(digits) + units[unit];
};

const count = value => String(value).replace(/\B(?=(\d{3})+(?!\d))/g, ",");

const duration = seconds => {
  const whole = Math.floor(seconds);
  if (whole < 10 && !Number.isInteger(seconds)) return (Math.floor(seconds * 10) / 10).toFixed(1) + "s";
  if (whole < 60) return whole + "s";
  if (whole < 3600) return Math.floor(whole / 60) + "m " + whole % 60 + "s";
  if (whole < 86400) return Math.floor(whole / 3600) + "h " + Math.floor(whole / 60) % 60 + "m";
  return Math.floor(whole / 86400) + "d " + Math.floor(whole / 3600) % 24 + "h";
};

// A value of any kind as text. What this page was not written for must be readable too.
export const plain = value => {
  if (value === null || value === undefined || value === "") return NONE;
  if (Array.isArray(value)) return value.map(plain).join(", ") || NONE;
  if (typeof value === "object") {
    return Object.entries(value).map(([key, inner]) => key + " " + plain(inner)).join(", ") || NONE;
  }
  return String(value);
};

const numeric = of => value => typeof value === "number" && Number.isFinite(value) ? of(value) : plain(value);

export const units = {
  text: plain,
  count: numeric(count),
  bytes: numeric(value => scaled(value, 1000, [" B", " kB", " MB", " GB", " TB", " PB", " EB"])),
  // Bytes per second, as bits.
  bits: numeric(value =>
    scaled(Math.floor(value * 8), 1000, [" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s"])),
  rate: numeric(value => scaled(value, 1000, ["/s", " k/s", " M/s"])),
  duration: numeric(duration),
  nanoseconds: numeric(value => scaled(value, 1000, [" ns", " µs", " ms", " s"])),
  share: numeric(value => (Math.floor(value * 1000 + 1e-9) / 10).toFixed(1) + " %"),
  code: numeric(value => "0x" + value.toString(16).padStart(8, "0")),
  yes: value => value === true ? "yes" : value === false ? "no" : plain(value),
};
