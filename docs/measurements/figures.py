"""Measurement files: loading, writing and reading single figures. Used by `render` and `measure`.

A file `AREA.json` holds `machine`, `commit`, `commands` and `tables`. A table has `columns` and `rows`.
The settings of a cell are its column's, then its row's, then those of the row's `override` for it:

- `command`: a name in `commands`. `with` replaces words of it.
- `field` of the command's JSON lines, and `match`: fields that such a line must have.
- `of`: another `match` and `field` to divide by. `percent`: the quotient as a change in percent.
- `mean`: the mean of the field over all lines that `match`.
- `pattern`: a regular expression over text output, in place of `field`. Its first group is the number.
- `over`: this row's first named column over the least of the others, in place of `field`.
- `scale`, `digits`, `prefix`, `unit`: how the number is shown.

`values[i]` of a row holds the results of all runs for column i. A figure is their median.
"""

import json
import statistics
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent


def areas():
    """Names of all measurement files."""
    return sorted(path.stem for path in HERE.glob("*.json"))


def load(area):
    return json.loads((HERE / f"{area}.json").read_text(encoding="utf8"))


def dump(area, doc):
    """Writes a file with one line per command, column and row, so that diffs show figures."""
    (HERE / f"{area}.json").write_text(text(doc), encoding="utf8")


def text(value, indent=0):
    flat = json.dumps(value, ensure_ascii=False)
    nested = isinstance(value, (dict, list)) and any(isinstance(v, (dict, list)) for v in children(value))
    if indent and (not nested or len(flat) <= 110 or "what" in value or "name" in value):
        return flat
    if not isinstance(value, (dict, list)):
        return flat
    pad = "  " * (indent + 1)
    if isinstance(value, dict):
        body = [f"{pad}{json.dumps(k)}: {text(v, indent + 1)}" for k, v in value.items()]
        opening, closing = "{", "}"
    else:
        body = [pad + text(v, indent + 1) for v in value]
        opening, closing = "[", "]"
    tail = "\n" if indent == 0 else ""
    return opening + "\n" + ",\n".join(body) + "\n" + "  " * indent + closing + tail


def children(value):
    return value.values() if isinstance(value, dict) else value


def cell(row, column):
    """What one cell is made of: the row's settings, overridden by the column's."""
    merged = {**row, **{k: v for k, v in column.items() if k != "name"}}
    override = row.get("override", {}).get(column["name"], {})
    merged.update(override)
    merged["match"] = {**row.get("match", {}), **column.get("match", {}), **override.get("match", {})}
    if "of" in merged:
        of = {"field": merged.get("field"), **merged["of"]}
        merged["of"] = {**of, "match": {**merged["match"], **of.get("match", {})}}
    return merged


def figure(row, index):
    """The median of a cell's runs; none where nothing was measured."""
    values = row["values"][index] if index < len(row["values"]) else None
    return statistics.median(values) if values else None


def shown(row, columns, index):
    """A cell as text, rounded as the table has it."""
    value = figure(row, index)
    if value is None:
        return ""
    spec = cell(row, columns[index])
    if spec.get("percent"):
        return f"{round(value, 1):+g}"
    return f"{spec.get('prefix', '')}{value:.{spec.get('digits', 2)}f}{spec.get('unit', '')}"


def rounded(row, columns, index):
    value = figure(row, index)
    return None if value is None else round(value, cell(row, columns[index]).get("digits", 2))


def verdict(row, columns):
    """`met`, `missed`, or where it is missed. Empty without a target."""
    target = row.get("target")
    if not target:
        return ""
    missed, held = [], 0
    for index, column in enumerate(columns):
        value, bound = rounded(row, columns, index), bound_of(target, index)
        if value is None or bound is None:
            continue
        good = value >= bound if target["op"] == ">=" else value <= bound
        held += good
        if not good:
            missed.append(column["name"])
    if not missed:
        return "met" if held else ""
    return "**missed**" if not held else "**missed**: " + ", ".join(missed)


def bound_of(target, index):
    bounds = target["bound"]
    if not isinstance(bounds, list):
        return bounds
    return bounds[index] if index < len(bounds) else None


def target_text(row):
    target = row.get("target")
    if not target:
        return ""
    sign = "≥" if target["op"] == ">=" else "≤"
    return target.get("text") or f"{sign} {target['bound']:g}"
