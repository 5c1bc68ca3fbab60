// The request of a conversation: its body, what is wrong with its fields, and the same as commands to copy.
//
// Does: turn the playground's fields into the body of /v1/chat/completions. Does not: send it.

// What the fields of the playground hold at first. Numbers are text, as typed; empty: the server's default.
export const NEW_FIELDS = {
  system: "",
  temperature: "",
  top_p: "",
  max_tokens: "512",
  seed: "",
  frequency_penalty: "",
  presence_penalty: "",
  stop: "", // one string per line
  tools: "", // JSON
  tool_choice: "auto",
  schema: "", // JSON
};

// Sampling fields: name, label, least, most, step.
export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, whole: true },
  { name: "seed", label: "Seed", step: 1, whole: true },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
];

const NAME = /^[A-Za-z0-9_-]{1,64}$/;

// By field name, what is wrong with it, in words; an empty object if nothing is.
export function problemsOf(fields) {
  const problems = {};
  const note = (name, problem) => {
    if (problem) problems[name] = problem;
  };
  for (const number of NUMBERS) note(number.name, numberProblem(fields[number.name], number));
  note("tools", toolsOf(fields.tools).problem);
  note("schema", schemaOf(fields.schema).problem);
  return problems;
}

function numberProblem(text, { label, min, max, whole }) {
  if (text.trim() === "") return "";
  const value = Number(text);
  if (!Number.isFinite(value)) return `${label} must be a number.`;
  if (whole && !Number.isSafeInteger(value)) return `${label} must be a whole number.`;
  if (min !== undefined && value < min) return `${label} must be ${min} or more.`;
  if (max !== undefined && value > max) return `${label} must be ${max} or less.`;
  return "";
}

function parsed(text) {
  try {
    return { value: JSON.parse(text) };
  } catch (error) {
    return { problem: `This is not JSON: ${error.message}` };
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

// The tools in `text`: {tools} (null: none), or {problem}. One tool, or a bare function, is taken as a list of one.
export function toolsOf(text) {
  if (!text.trim()) return { tools: null };
  const { value, problem } = parsed(text);
  if (problem) return { problem };
  const list = Array.isArray(value) ? value : [value];
  if (!list.length) return { tools: null };
  const tools = list.map((entry) =>
    isObject(entry) && !("type" in entry) && "name" in entry ? { type: "function", function: entry } : entry,
  );
  for (const [index, tool] of tools.entries()) {
    const found = toolProblem(tool);
    if (found) return { problem: `Tool ${index + 1}: ${found}` };
  }
  return { tools };
}

function toolProblem(tool) {
  if (!isObject(tool)) return "it must be an object.";
  if (tool.type !== "function") return '"type" must be "function".';
  if (!isObject(tool.function)) return '"function" must be an object.';
  const { name, parameters } = tool.function;
  if (typeof name !== "string" || !NAME.test(name)) {
    return '"name" must be 1 to 64 letters, digits, dashes or underscores.';
  }
  if (parameters !== undefined && !isObject(parameters)) return '"parameters" must be a JSON schema, an object.';
  return "";
}

// The response format in `text`: {format} (null: none), or {problem}. A bare schema is wrapped.
export function schemaOf(text) {
  if (!text.trim()) return { format: null };
  const { value, problem } = parsed(text);
  if (problem) return { problem };
  if (!isObject(value)) return { problem: "A JSON schema is an object." };
  if (value.type === "json_object") return { format: value };
  if (value.type === "json_schema") {
    if (!isObject(value.json_schema) || !isObject(value.json_schema.schema)) {
      return { problem: '"json_schema" must have a "schema", an object.' };
    }
    return { format: { ...value, json_schema: { name: "answer", ...value.json_schema } } };
  }
  const name = typeof value.title === "string" && NAME.test(value.title) ? value.title : "answer";
  return { format: { type: "json_schema", json_schema: { name, schema: value } } };
}

// The body for `model` and `messages` (without the system prompt). Fields must have no problems.
export function bodyOf(model, messages, fields) {
  const body = { model, messages: [...messages] };
  if (fields.system.trim()) body.messages.unshift({ role: "system", content: fields.system });
  for (const { name } of NUMBERS) {
    if (fields[name].trim() !== "") body[name] = Number(fields[name]);
  }
  const stop = fields.stop.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  const { tools } = toolsOf(fields.tools);
  if (tools) {
    body.tools = tools;
    if (fields.tool_choice !== "auto") body.tool_choice = fields.tool_choice;
  }
  const { format } = schemaOf(fields.schema);
  if (format) body.response_format = format;
  return body;
}

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// `body` as a curl command.
export function asCurl(body, origin, needsKey) {
  const lines = [
    `curl -N ${shellQuoted(`${origin}/v1/chat/completions`)}`,
    ...(needsKey ? ['-H "Authorization: Bearer $TONLE_API_KEY"'] : []),
    "-H 'Content-Type: application/json'",
    `-d ${shellQuoted(JSON.stringify({ ...body, stream: true }, null, 2))}`,
  ];
  return lines.join(" \\\n  ");
}

// `body` as a program for the openai package.
export function asPython(body, origin, needsKey) {
  const key = needsKey ? 'os.environ["TONLE_API_KEY"]' : '"none"';
  const given = Object.entries(body).map(([name, value]) => `    ${name}=${pythonOf(value, "    ")},`);
  const toolCalls = body.tools ? ["    for call in delta.tool_calls or []:", "        print(call.function)"] : [];
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${pythonOf(`${origin}/v1`)}, api_key=${key})`,
    "stream = client.chat.completions.create(",
    ...given,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    if not chunk.choices:",
    "        continue",
    "    delta = chunk.choices[0].delta",
    '    print(delta.content or "", end="", flush=True)',
    ...toolCalls,
    "",
  ].join("\n");
}

// A JSON value as a Python literal.
export function pythonOf(value, indent = "") {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value); // strings: JSON's escapes are Python's, too
  const inner = `${indent}    `;
  const isList = Array.isArray(value);
  const parts = isList
    ? value.map((entry) => pythonOf(entry, inner))
    : Object.entries(value).map(([name, entry]) => `${JSON.stringify(name)}: ${pythonOf(entry, inner)}`);
  const [open, close] = isList ? "[]" : "{}";
  const flat = `${open}${parts.join(", ")}${close}`;
  if (flat.length + indent.length <= 90 && !flat.includes("\n")) return flat;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}`;
}
