"""The HTML report: one file with everything in it, which opens without a network.

Does: turn saved runs into a page: tables, charts as inline SVG, and data that `script.js` draws timelines from.
Does not: measure, compare, or load anything from elsewhere: its content policy forbids it.
"""
