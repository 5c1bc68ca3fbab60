// What a worker pool tells of its model, in words: dimensions, sample rate, languages, voices.

import { count, number, seconds } from "../format.js";

const MOST_NAMED = 4; // of a list; of a longer one, how many there are

// Of facts whose names do not say it all. Empty: left out.
const WORDS = {
  sample_rate: (value) => `${number(value / 1000)} kHz`,
  max_audio_s: (value) => `recordings up to ${seconds(value)}`,
  max_input_chars: (value) => `texts up to ${count(value)} characters`,
  max_tokens: (value) => `texts up to ${count(value)} tokens`,
  max_pixels: (value) => `pictures up to ${count(value)} pixels`,
  translates: (value) => (value ? "translates to English" : ""),
};

export function factWords(facts) {
  return Object.entries(facts ?? {}).map(words).filter(Boolean).join(" · ");
}

function words([name, value]) {
  if (value === null || (typeof value === "object" && !Array.isArray(value))) return "";
  if (Object.hasOwn(WORDS, name) && !Array.isArray(value)) return WORDS[name](value);
  const title = name.replaceAll("_", " ");
  if (Array.isArray(value) && value.length > MOST_NAMED) return `${count(value.length)} ${title}`;
  return `${title} ${[value].flat().map(word).join(", ")}`;
}

const word = (value) => (typeof value === "boolean" ? (value ? "yes" : "no") : typeof value === "number" ? number(value) : value);

// Which languages a model understands, if it says so and they are few.
export function understands(facts) {
  const languages = Array.isArray(facts?.languages) ? facts.languages : [];
  if (!languages.length || languages.length > MOST_NAMED) return "";
  return `It understands ${languages.map(languageName).join(", ")} only.`;
}

function languageName(code) {
  try {
    return new Intl.DisplayNames("en", { type: "language" }).of(code);
  } catch {
    return String(code); // not a code
  }
}
