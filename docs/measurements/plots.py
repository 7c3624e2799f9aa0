"""Plots as SVG, without libraries. Colours and text are readable on light and dark pages."""

from html import escape
from math import log2

INK = "#808894"
GRID = "#80889455"
COLOURS = ["#3f7fd0", "#d5862f", "#4c9f63", "#a06cc8", "#c9524f", "#2f9ea3"]


class Canvas:
    def __init__(self, width, height, caption):
        self.width, self.height = width, height
        self.parts = [f"<title>{escape(caption)}</title>"]

    def line(self, x1, y1, x2, y2, colour=GRID, width=1.0, dash=""):
        dash = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width:g}"{dash}/>'
        )

    def rect(self, x, y, width, height, colour):
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" rx="1.5" fill="{colour}"/>'
        )

    def text(self, x, y, text, anchor="middle", size=12, turn=False, weight="", colour=INK):
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
        weight = f' font-weight="{weight}"' if weight else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{weight}{turn}>{escape(text)}</text>'
        )

    def dot(self, x, y, colour, radius=4.0, filled=True):
        fill = colour if filled else "none"
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
        )

    def path(self, points, colour, dash=""):
        dash = f' stroke-dasharray="{dash}"' if dash else ""
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')

    def legend(self, names, x, y, colours=COLOURS):
        for name, colour in zip(names, colours):
            self.rect(x, y - 9, 11, 11, colour)
            self.text(x + 16, y, name, "start")
            x += 34 + 6.6 * len(name)

    def svg(self):
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="system-ui, sans-serif">\n{body}\n</svg>\n'
        )


def ticks(most):
    """Round steps from 0 past `most`, at most seven of them."""
    step = next(s * 10**e for e in range(-3, 6) for s in (1, 2, 2.5, 5) if most / (s * 10**e) <= 6)
    count = int(-(-most // step))
    return [i * step for i in range(count + 1)]


def bars(caption, axis, groups, names, values):
    """Grouped vertical bars: `values[series][group]`."""
    c = Canvas(760, 300, caption)
    left, right, top, bottom = 62, 745, 56, 255
    c.text(left - 45, 20, caption, "start", 14, weight="600")
    c.legend(names, left, 42)
    marks = ticks(max(v for series in values for v in series if v is not None) * 1.02)
    y = lambda value: bottom - (bottom - top) * value / marks[-1]
    for mark in marks:
        c.line(left, y(mark), right, y(mark))
        c.text(left - 8, y(mark) + 4, f"{mark:g}", "end")
    c.text(18, (top + bottom) / 2, axis, turn=True)
    wide = (right - left) / len(groups)
    bar = min(46, wide * 0.78 / len(values))
    for g, group in enumerate(groups):
        middle = left + wide * (g + 0.5)
        for s, series in enumerate(values):
            if series[g] is None:
                continue
            x = middle + (s - len(values) / 2) * bar
            c.rect(x + 1, y(series[g]), bar - 2, bottom - y(series[g]), COLOURS[s])
            c.text(x + bar / 2, y(series[g]) - 4, f"{series[g]:.2f}", size=10)
        c.text(middle, bottom + 18, group)
    c.line(left, bottom, right, bottom, INK)
    return c.svg()


def hbars(caption, axis, labels, names, values, texts, mark=None, left=150):
    """Grouped horizontal bars: `values[series][label]`, with `texts` at their ends."""
    rows, thick = len(labels), 15
    pitch = thick * len(names) + 9
    top = 54 if len(names) > 1 else 36
    bottom = top + rows * pitch + 4
    c = Canvas(760, bottom + 46, caption)
    right = 690
    c.text(17, 20, caption, "start", 14, weight="600")
    if len(names) > 1:
        c.legend(names, left, 42)
    marks = ticks(max(v for series in values for v in series if v is not None) * 1.02)
    x = lambda value: left + (right - left) * value / marks[-1]
    for value in marks:
        c.line(x(value), top, x(value), bottom)
        c.text(x(value), bottom + 16, f"{value:g}")
    c.text((left + right) / 2, bottom + 36, axis)
    for i, label in enumerate(labels):
        at = top + i * pitch + 6
        c.text(left - 8, at + thick * len(names) / 2 + 4, label, "end")
        for s, series in enumerate(values):
            if series[i] is not None:
                c.rect(left, at + s * thick + 1, x(series[i]) - left, thick - 2, COLOURS[s])
                end, wide = x(series[i]) + 5, 6.5 * len(texts[s][i])
                if mark is not None and end - 4 <= x(mark) <= end + wide:
                    end = x(mark) + 6
                c.text(end, at + s * thick + thick - 4, texts[s][i], "start", 10.5)
    if mark is not None:
        c.line(x(mark), top, x(mark), bottom, INK, 1.5, "4 3")
    c.line(left, top, left, bottom, INK)
    return c.svg()


def lines(caption, axis, xaxis, xs, names, values, floor=None):
    """Lines over a shared x. `floor` times x is drawn as the least that is possible."""
    c = Canvas(760, 320, caption)
    left, right, top, bottom = 70, 600, 40, 262
    c.text(17, 20, caption, "start", 14, weight="600")
    marks = ticks(max(v for series in values for v in series if v is not None))
    x = lambda value: left + (right - left) * (value - xs[0]) / (xs[-1] - xs[0])
    y = lambda value: bottom - (bottom - top) * value / marks[-1]
    for mark in marks:
        c.line(left, y(mark), right, y(mark))
        c.text(left - 8, y(mark) + 4, f"{mark:g}", "end")
    for value in xs:
        c.line(x(value), bottom, x(value), bottom + 5, INK)
        c.text(x(value), bottom + 19, f"{value:g}")
    c.text((left + right) / 2, bottom + 42, xaxis)
    c.text(18, (top + bottom) / 2, axis, turn=True)
    ends = []
    for s, series in enumerate(values):
        points = [(x(at), y(v)) for at, v in zip(xs, series) if v is not None]
        c.path(points, COLOURS[s])
        for point in points:
            c.dot(*point, COLOURS[s], 3)
        ends.append([points[-1][1], names[s], COLOURS[s]])
    if floor is not None:
        c.path([(x(at), y(floor * at)) for at in xs], INK, "5 4")
        ends.append([y(floor * xs[-1]), "computing alone", INK])
    ends.sort()
    for before, after in zip(ends, ends[1:]):
        after[0] = max(after[0], before[0] + 15)
    for at, name, colour in ends:
        c.text(right + 10, at + 4, name, "start", colour=colour)
    c.line(left, bottom, right, bottom, INK)
    return c.svg()


def accuracy(caption, panels):
    """Accuracy over bytes: panels `(title, full, [(name, [(bytes, percent), ...])])`, larger groups first."""
    c = Canvas(760, 430, caption)
    c.text(17, 20, caption, "start", 14, weight="600")
    c.dot(24, 40, INK, 4)
    c.text(34, 44, "groups of 8 tokens", "start")
    c.dot(164, 40, INK, 4, filled=False)
    c.text(174, 44, "groups of 4", "start")
    c.line(262, 40, 286, 40, INK, 1.5, "5 4")
    c.text(292, 44, "full attention", "start")
    top, bottom, low, high, least = 84, 366, 2.0, 10.0, 30
    for p, (title, full, methods) in enumerate(panels):
        left = 58 + p * 366
        right = left + 322
        x = lambda size: left + (right - left) * (log2(size) - low) / (high - low)
        y = lambda percent: bottom - (bottom - top) * (percent - least) / (102 - least)
        c.text((left + right) / 2, top - 16, title, weight="600")
        for percent in range(least, 101, 10):
            c.line(left, y(percent), right, y(percent))
            c.text(left - 8, y(percent) + 4, str(percent), "end")
        for power in range(int(low), int(high) + 1, 2):
            c.line(x(2**power), bottom, x(2**power), bottom + 5, INK)
            c.text(x(2**power), bottom + 19, str(2**power))
        c.line(left, y(full), right, y(full), INK, 1.5, "5 4")
        c.line(left, bottom, right, bottom, INK)
        c.text((left + right) / 2, bottom + 42, "bytes of summary per token and layer (log scale)")
        dots = [[(x(size), y(percent)) for size, percent in points] for _, points in methods]
        taken = [(dx - 5, dy - 5, dx + 5, dy + 5) for points in dots for dx, dy in points]
        taken.append((left, y(full) - 1, right, y(full) + 1))
        for m, (name, _) in enumerate(methods):
            colour = COLOURS[m % len(COLOURS)]
            c.line(*dots[m][0], *dots[m][-1], colour, 1)
            for d, dot in enumerate(dots[m]):
                c.dot(*dot, colour, filled=d == 0)
            place(c, taken, dots[m][0], name, colour, (left, right))
    c.text(18, (top + bottom) / 2, "items answered, %", turn=True)
    return c.svg()


def place(c, taken, dot, name, colour, limits):
    """Writes a label at the nearest place where it covers no dot, no line and no other label."""
    wide, (x, y) = 6.2 * len(name), dot
    spots = [(side, dy) for dy in range(0, 120, 4) for side in (8, -8 - wide) for dy in (dy, -dy)]
    spots += [(-wide / 2, dy) for d in range(14, 120, 4) for dy in (d, -d)]
    spots.sort(key=lambda spot: abs(spot[1]) + (0 if spot[0] == 8 else 6 if spot[0] == -8 - wide else 3))
    for dx, dy in spots:
        box = (x + dx, y + dy - 6, x + dx + wide, y + dy + 6)
        clear = all(box[2] < t[0] or t[2] < box[0] or box[3] < t[1] or t[3] < box[1] for t in taken)
        if clear and limits[0] <= box[0] and box[2] <= limits[1] + 12 and box[1] > 62:
            break
    if abs(dy) > 14:
        end = box[0] if dx == 8 else box[2] if dx == -8 - wide else x + dx + wide / 2
        c.line(x, y, end, y + dy - (6 if dy > 0 else -6) * (dx == -wide / 2), colour, 0.6)
    taken.append(box)
    c.text(box[0], y + dy + 4, name, "start", 11, colour=colour)
