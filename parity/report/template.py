"""The page's frame: its head with the style, for `string.Template`. Nothing is loaded from anywhere."""

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #1d2329; --soft: #59636e; --line: #d8dde2;
  --good: #14713d; --bad: #b3261e; --bad-soft: #fbe9e7; --peer: #8a5a00; --peer-soft: #fdf3dc; --accent: #1f5fa8; }
@media (prefers-color-scheme: dark) { :root { --page: #14181c; --card: #1c2126; --ink: #e6e9ec; --soft: #a2acb6;
  --line: #39424b; --good: #6fcf97; --bad: #ff8a80; --bad-soft: #46211f; --peer: #f0c36d; --peer-soft: #3b3018;
  --accent: #8ab8f0; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p, figcaption, li { max-width: 46rem; } a { color: var(--accent); }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; list-style: none; }
.verdict { font-size: 1.1rem; font-weight: 600; max-width: none;
  padding: .6rem .9rem; border-radius: .5rem; border: 1px solid; }
.verdict.good { color: var(--good); } .verdict.bad { color: var(--bad); background: var(--bad-soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; background: var(--card); margin: .5rem 0; }
.scroll.tall { max-height: 75vh; overflow-y: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }
caption { text-align: left; padding: .5rem .6rem; color: var(--soft); }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
thead th, thead th.text { font-weight: 600; background: var(--card); border-top: 0; vertical-align: bottom; }
.tall thead th, thead th.text { font-weight: 600; position: sticky; top: 0; z-index: 1; }
th[scope=row], th.text, td.text { text-align: left; font-weight: 500; }
td.text { white-space: normal; min-width: 14rem; overflow-wrap: anywhere; }
.bad { color: var(--bad); font-weight: 600; } td.bad, tr.bad > * { background: var(--bad-soft); }
.beyond { color: var(--peer); } td.beyond { background: var(--peer-soft); }
.good { color: var(--good); } .soft { color: var(--soft); }
figure { margin: 1rem 0; } .drawing { overflow-x: auto; } figcaption { color: var(--soft); font-size: .9rem; }
figure svg { display: block; width: 100%; min-width: 28rem; max-width: 46rem; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
.matrices { display: flex; flex-wrap: wrap; gap: 1rem; } .matrices > div { flex: 0 1 auto; max-width: 100%; }
td.share { background: color-mix(in srgb, var(--accent) calc(var(--share) * 45%), var(--card)); }
summary { cursor: pointer; padding: .3rem 0; }
@media (max-width: 40rem) { body { font-size: 15px; } main { padding: 1rem .6rem 3rem; } }
@media print { .scroll.tall { max-height: none; } }
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>penstock parity: $headline</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
"""
