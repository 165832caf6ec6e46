"""The style sheet of the HTML report: light, dark, phone and print from one set of variables."""

CSS = """
:root {
  --paper: #fdfdfb; --ink: #1d2329; --quiet: #5c6670; --faint: #a9b1b8; --line: #d9dee2;
  --tint: #f2f4f5; --good: #12704f; --bad: #b03a2e; --open: #8a5a00; --accent: #1f6fae;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181c; --ink: #e3e7ea; --quiet: #9aa5ae; --faint: #606b75; --line: #323a42;
    --tint: #1c2228; --good: #56c99a; --bad: #f08a7d; --open: #e0b04e; --accent: #74b6ea;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 1.5rem clamp(.9rem, 3vw, 2.5rem) 4rem; max-width: 84rem;
  background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .7rem; }
h3 { font-size: 1rem; margin: 0 0 .2rem; }
p { margin: .4rem 0; max-width: 70ch; }
ul { margin: .4rem 0; padding-left: 1.2rem; }
li { max-width: 78ch; overflow-wrap: anywhere; }
code { font: .92em ui-monospace, "DejaVu Sans Mono", monospace; }
small { display: block; font-size: .84em; font-weight: 400; color: var(--quiet); }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin-top: .8rem; font-size: .9rem; }
a { color: var(--accent); text-decoration: none; }
a:hover, a:focus { text-decoration: underline; }
.quiet, .note { color: var(--quiet); }
.note { font-size: .86rem; }
p.label { color: var(--open); font-weight: 600; }
span.label { color: var(--open); font-size: .8rem; font-weight: 600; }
.scroll { overflow-x: auto; max-width: 100%; }
table {
  border-collapse: separate; border-spacing: 0; font-size: .88rem;
  font-variant-numeric: tabular-nums;
}
th, td {
  padding: .32rem .6rem; text-align: left; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid var(--line);
}
thead th { vertical-align: bottom; border-bottom: 2px solid var(--faint); white-space: normal; }
thead th.number { min-width: 5.4rem; }
tbody th { font-weight: 500; }
th:first-child { position: sticky; left: 0; background: var(--paper); padding-left: 0; z-index: 1; }
.number { text-align: right; }
.dense td, .dense tbody th { padding-top: .16rem; padding-bottom: .16rem; }
.headline td:last-child { white-space: normal; min-width: 6.2rem; }
.dense td { white-space: normal; max-width: 11rem; }
.wraps td, .wraps tbody th { white-space: normal; overflow-wrap: anywhere; min-width: 5rem; }
.wraps td:nth-last-child(-n+2):not(.number) { min-width: 12rem; }
tr.block th { padding-top: 1.1rem; font-weight: 700; border-bottom-color: var(--faint); }
tr.block span { position: sticky; left: 0; }
tr.baseline > * { background: var(--tint); }
tr.baseline > th { padding-left: .4rem; }
tr.verdict > * { font-weight: 700; border-bottom: 2px solid var(--faint); }
td.good small, td.good > span:only-child, tr.verdict td.good, b.good { color: var(--good); }
td.bad small, td.bad > span:only-child, tr.verdict td.bad, b.bad { color: var(--bad); }
td.open small, td.open > span:only-child, tr.verdict td.open, b.open { color: var(--open); }
details { margin: .9rem 0; }
summary { font-weight: 600; cursor: pointer; padding: .2rem 0; }
.figures {
  display: grid; gap: 1.2rem 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
}
figure { margin: 0; max-width: 40rem; }
figcaption { font-size: .9rem; font-weight: 600; margin-bottom: .2rem; }
figure svg { display: block; width: 100%; height: auto; }
.keys { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .9rem; }
.keys span::before {
  content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  background: var(--key); -webkit-print-color-adjust: exact; print-color-adjust: exact;
}
.cards {
  display: grid; gap: .9rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr));
}
article { border: 1px solid var(--line); border-left: 4px solid; padding: .7rem .9rem; }
article.good { border-left-color: var(--good); }
article.bad { border-left-color: var(--bad); }
article.open { border-left-color: var(--open); }
.cards + ul { margin-top: 1rem; }
article ul { font-size: .88rem; color: var(--quiet); }
@media (max-width: 30rem) {
  body { font-size: 14px; padding-top: 1rem; }
  th, td { padding: .3rem .55rem; }
  thead th.number { min-width: 5.2rem; }
  .dense tbody th { white-space: normal; min-width: 8.5rem; }
}
@media print {
  :root {
    --paper: #fff; --ink: #000; --quiet: #444; --faint: #888; --line: #ccc; --tint: #f3f3f3;
    --good: #0b5c3f; --bad: #9a2b20; --open: #6f4800; --accent: #000;
  }
  @page { size: A4 landscape; margin: 12mm; }
  html { font-size: 12px; }
  body { font-size: 12px; max-width: none; padding: 0; }
  nav { display: none; }
  .scroll { overflow: visible; }
  .figures { display: block; }
  figure { display: inline-block; width: 46%; margin: 0 3% 4mm 0; vertical-align: top; }
  figure svg { max-height: 136mm; }
  th, td { padding: .15rem .4rem; white-space: normal; }
  tr, figure, article, details { break-inside: avoid; }
  h2, summary { break-after: avoid; }
}
"""
