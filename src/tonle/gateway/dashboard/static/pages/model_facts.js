// What a worker pool tells of its model, in words: dimensions, sample rate, languages, voices.

const MOST_NAMED = 4; // of a list; of a longer one, how many there are

export function factWords(facts) {
  return Object.entries(facts ?? {}).map(words).filter(Boolean).join(" · ");
}

function words([name, value]) {
  if (value === null || (typeof value === "object" && !Array.isArray(value))) return "";
  const shown = Array.isArray(value) && value.length > MOST_NAMED ? value.length : [value].flat().join(", ");
  return `${name.replaceAll("_", " ")} ${shown}`;
}
