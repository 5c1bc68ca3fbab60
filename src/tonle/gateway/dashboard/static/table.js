// A table that sorts by its headings and, with many rows, renders only those in view.
//
//   <${Table} label="Requests" rows=${rows} rowKey=${(row) => row.id} columns=${[
//     { id: "time", title: "Time", value: (row) => row.time, show: (row) => clock(row.time), width: "9ch" },
//     { id: "tokens", title: "Tokens", value: (row) => row.completion_tokens, align: "right", wide: true },
//   ]} sort=${{ id: "time", descending: true }} height=${480} onOpen=${(row) => go(`#/requests/${row.id}`)} />
//
// A column: `value(row)` is sorted by, and shown unless there is `show(row)` (text or an element); `sortable: false` for actions;
// `wide: true` hides it at phone width, `wide: "most"` below 1280 px; `width` (CSS) is needed where `height` is given. A table with
// `height` scrolls in itself and is virtual: rows are `ROW_PX` high, texts are cut with an ellipsis, and elements are used again for
// other rows, which costs half of making new ones and leaves the keyboard where it is. With `onOpen`, the first cell is a button.

import { html, useMemo, useRef, useState } from "./html.js";

export const ROW_PX = 34;
const SPARE_ROWS = 4; // rendered above and below what is in view

export function Table({ label, columns, rows, rowKey, sort = null, height = null, onOpen = null, openKey = null, empty = "Nothing yet.", testid }) {
  const [order, setOrder] = useState(sort);
  const [top, setTop] = useState(0);
  const body = useRef(null);
  const sorted = useMemo(() => sortRows(rows, columns, order), [rows, order]);
  const from = height ? Math.max(0, Math.min(Math.floor(top / ROW_PX) - SPARE_ROWS, sorted.length)) : 0;
  const slots = height ? Math.ceil(height / ROW_PX) + 2 * SPARE_ROWS : sorted.length;
  const to = Math.min(sorted.length, from + slots);
  const shown = sorted.slice(from, to);

  const sortBy = (column) => setOrder((before) => ({ id: column.id, descending: before?.id === column.id ? !before.descending : column.align === "right" }));
  const cells = { columns, onOpen };
  return html`
    <div class=${`table-box${height ? " virtual" : ""}`} role="region" aria-label=${label} tabindex="0" data-testid=${testid}
      style=${height ? { maxHeight: `${height}px` } : {}} onScroll=${height ? (event) => setTop(event.currentTarget.scrollTop) : null}>
      <table aria-rowcount=${sorted.length + 1}>
        <colgroup>${columns.map((column) => html`<col key=${column.id} class=${wideClass(column)} style=${column.width ? { width: column.width } : {}} />`)}</colgroup>
        <thead>
          <tr aria-rowindex="1">${columns.map((column) => html`<${Heading} key=${column.id} column=${column} order=${order} onSort=${sortBy} />`)}</tr>
        </thead>
        <tbody ref=${body} onKeyDown=${onOpen ? (event) => moveFocus(event, body.current) : null}>
          ${from > 0 && html`<${Spacer} rows=${from} />`}
          ${shown.map((row, i) => html`
            <${Row} key=${height ? (from + i) % slots : rowKey(row)} row=${row} index=${from + i + 2} isOpen=${openKey !== null && rowKey(row) === openKey} ...${cells} />`)}
          ${to < sorted.length && html`<${Spacer} rows=${sorted.length - to} />`}
          ${sorted.length === 0 && html`<tr><td class="empty" colspan=${columns.length}>${empty}</td></tr>`}
        </tbody>
      </table>
    </div>`;
}

function Heading({ column, order, onSort }) {
  const classes = cellClass(column);
  if (column.sortable === false) return html`<th scope="col" class=${classes}>${column.title}</th>`;
  const isOrder = order?.id === column.id;
  const state = isOrder ? (order.descending ? "descending" : "ascending") : "none";
  return html`
    <th scope="col" class=${classes} aria-sort=${state}>
      <button type="button" class="sort" onClick=${() => onSort(column)}>
        ${column.title}<span class="arrow" aria-hidden="true">${isOrder ? (order.descending ? "▼" : "▲") : ""}</span>
      </button>
    </th>`;
}

function Row({ row, index, columns, onOpen, isOpen }) {
  const cell = (column) => (column.show ? column.show(row) : (column.value(row) ?? "–"));
  const open = onOpen && ((event) => {
    if (!event.target.closest("a, button, input, select")) onOpen(row);
  });
  return html`
    <tr aria-rowindex=${index} class=${`${onOpen ? "opens" : ""}${isOpen ? " open" : ""}`} onClick=${open}>
      ${columns.map((column, i) => html`
        <td key=${column.id} class=${cellClass(column)}>
          ${i === 0 && onOpen
            ? html`<button type="button" class="open-row" aria-expanded=${isOpen} onClick=${() => onOpen(row)}>${cell(column)}</button>`
            : cell(column)}
        </td>`)}
    </tr>`;
}

// Stands for rows that are out of view. One cell: a wider one would make columns of those that are hidden at this width.
function Spacer({ rows }) {
  return html`<tr class="spacer" aria-hidden="true"><td style=${{ height: `${rows * ROW_PX}px` }}></td></tr>`;
}

const wideClass = (column) => (column.wide === "most" ? "wide widest" : column.wide ? "wide" : "");
const cellClass = (column) => `${column.align === "right" ? "right " : ""}${wideClass(column)}`;

// Arrow keys go from row to row.
function moveFocus(event, body) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || !event.target.classList.contains("open-row")) return;
  const buttons = [...body.querySelectorAll(".open-row")];
  const next = buttons[buttons.indexOf(event.target) + step];
  if (!next) return;
  event.preventDefault();
  next.focus();
}

// Unknown values (null) come last in both directions; equal ones keep their order.
export function sortRows(rows, columns, order) {
  const column = order && columns.find((one) => one.id === order.id);
  if (!column?.value) return rows;
  const sign = order.descending ? -1 : 1;
  const compare = (a, b) => {
    const unknown = Number(a === null || a === undefined) - Number(b === null || b === undefined);
    if (unknown) return unknown;
    return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
  };
  const values = rows.map(column.value);
  const isSorted = values.every((value, i) => i === 0 || compare(values[i - 1], value) <= 0);
  if (isSorted) return rows;
  const places = values.map((_, i) => i).sort((i, j) => compare(values[i], values[j]));
  return places.map((i) => rows[i]);
}
