"""How the page looks: light or dark as the reader's system is, and as narrow as a phone."""

STYLE = """
:root { color-scheme: light dark; --ink:#1d2733; --soft:#5d6b7a; --page:#ffffff; --card:#f5f7fa; --line:#d9e0e8;
  --c0:#2468c8; --c1:#d2571c; --c2:#1f8f5f; --c3:#8a4fc7; --c4:#b3861a; --c5:#b8336a;
  --good:31,143,95; --bad:210,60,40; }
@media (prefers-color-scheme: dark) { :root { --ink:#e4eaf1; --soft:#9aa8b7; --page:#12171d; --card:#1b222b;
  --line:#313c48; --c0:#6fa8ff; --c1:#ff9a62; --c2:#5fd3a0; --c3:#c39bf5; --c4:#e5c05a; --c5:#f07fae;
  --good:95,211,160; --bad:255,120,100; } }
* { box-sizing:border-box; }
body { margin:0 auto; max-width:900px; padding:1rem; background:var(--page); color:var(--ink);
  font:16px/1.5 system-ui, sans-serif; }
h1 { font-size:1.6rem; margin:.4rem 0; overflow-wrap:anywhere; } h2 { font-size:1.15rem; margin:0 0 .6rem; }
section { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:1rem; margin:1rem 0; }
p { margin:.4rem 0; } small, .tick { color:var(--soft); }
.numbers { display:flex; flex-wrap:wrap; gap:.6rem; padding:0; list-style:none; margin:.6rem 0 0; }
.numbers li { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:.4rem .8rem; }
.numbers b { display:block; font-size:1.25rem; }
figure { margin:0; } svg { max-width:100%; } figure svg { width:100%; height:auto; display:block; }
.tick { font-size:12px; fill:var(--soft); } .grid { stroke:var(--line); } .tiles text { fill:var(--ink); }
.curve { fill:none; stroke-width:2; } .curve.c2,.curve.c4 { stroke-dasharray:7 6; }
.curve.c0,.dot.c0 { stroke:var(--c0); } .curve.c1,.dot.c1 { stroke:var(--c1); }
.curve.c2,.dot.c2 { stroke:var(--c2); } .curve.c3,.dot.c3 { stroke:var(--c3); } .curve.c4,.dot.c4 { stroke:var(--c4); }
.curve.c5,.dot.c5 { stroke:var(--c5); } .dot { fill:var(--card); stroke-width:2; }
.key { margin-right:1rem; white-space:nowrap; }
.key::before { content:""; display:inline-block; width:.8em; height:.8em;
  border-radius:2px; margin-right:.35em; background:var(--c0); }
.key.c1::before { background:var(--c1); } .key.c2::before { background:var(--c2); }
.key.c3::before { background:var(--c3); }
.key.c4::before { background:var(--c4); } .key.c5::before { background:var(--c5); }
table { border-collapse:collapse; } th, td { padding:.2rem .5rem; text-align:left; vertical-align:top; }
td.num { text-align:right; font-variant-numeric:tabular-nums; } tr + tr > * { border-top:1px solid var(--line); }
.scroll { overflow-x:auto; } .rows { max-height:30rem; overflow-y:auto; }
.model th { font-weight:600; } .model td { font-size:.85rem; min-width:3.5rem; }
.model .shape { white-space:nowrap; }
.confusion td, .confusion th { text-align:center; padding:.15rem .4rem; font-size:.85rem; }
.confusion .right { background:rgba(var(--good), calc(.75 * var(--share))); }
.confusion .wrong { background:rgba(var(--bad), min(1, calc(4 * var(--share)))); }
.confusion caption { text-align:left; color:var(--soft); font-size:.85rem; padding-bottom:.3rem; }
.mistakes { display:flex; flex-wrap:wrap; gap:.6rem; list-style:none; padding:0; margin:.4rem 0; }
.mistakes li { text-align:center; font-size:.8rem; } .mistakes img { width:56px; height:56px; display:block;
  margin:0 auto .2rem; image-rendering:pixelated; border:1px solid var(--line); }
.tile { fill:rgba(127,150,180,.18); stroke:var(--c0); } .halo { fill:none; stroke:var(--c1); stroke-width:2;
  stroke-dasharray:4 3; }
.bars { width:100%; } .bars .bar { width:70%; white-space:nowrap; font-size:0; } .piece { display:inline-block;
  height:18px; background:var(--c0); } .piece.c1 { background:var(--c1); } .piece.c2 { background:var(--c2); }
.piece.c3 { background:var(--c3); } .piece.c4 { background:var(--c4); } .piece.c5 { background:var(--c5); }
.slices { display:flex; width:140px; } .slices .piece { color:#fff; font:12px/18px system-ui, sans-serif;
  text-align:center; overflow:hidden; } pre { overflow-x:auto; font-size:.8rem; margin:0; }
@media (max-width:560px) { body { padding:.5rem; } section { padding:.7rem; } .bars .bar { width:50%; } }
"""
