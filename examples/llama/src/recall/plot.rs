//! Plots accuracy against resident bytes per token, as SVG.

use std::fmt::Write as _;

use super::table::{Comparison, FULL, Row};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 420.0;
const MARGIN: f64 = 56.0;
const COLOURS: [&str; 6] = ["#1b6ca8", "#c1440e", "#2e7d32", "#6a1b9a", "#795548", "#455a64"];

/// Returns a plot with one mark per method and one colour per budget. A mark is the mean over contexts. The axis of
/// bytes is logarithmic, from 1 to 1024.
#[must_use]
pub fn svg(table: &Comparison) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"10\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    axes(&mut out);
    for (index, budget) in table.budgets().into_iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let at = MARGIN + 90.0 * index as f64;
        let _ = writeln!(out, "<text x=\"{at}\" y=\"{}\" fill=\"{colour}\">budget {budget}</text>", MARGIN - 8.0);
        marks(&mut out, table, budget, colour);
    }
    out.push_str("</svg>\n");
    out
}

fn x(bytes: f64) -> f64 {
    MARGIN + (bytes.max(1.0).log2() / 10.0).min(1.0) * (WIDTH - 2.0 * MARGIN)
}

fn y(accuracy: f64) -> f64 {
    HEIGHT - MARGIN - accuracy * (HEIGHT - 2.0 * MARGIN)
}

/// Writes grid lines, their numbers and the titles of the axes.
fn axes(out: &mut String) {
    for power in (0..=10).step_by(2) {
        let at = x(f64::from(1_u32 << power));
        let (top, bottom) = (MARGIN, HEIGHT - MARGIN);
        let _ = writeln!(out, "<line x1=\"{at}\" y1=\"{top}\" x2=\"{at}\" y2=\"{bottom}\" stroke=\"#ddd\"/>");
        let _ =
            writeln!(out, "<text x=\"{at}\" y=\"{}\" text-anchor=\"middle\">{}</text>", bottom + 14.0, 1_u32 << power);
    }
    for tenth in (0..=10).step_by(2) {
        let at = y(f64::from(tenth) / 10.0);
        let (left, right) = (MARGIN, WIDTH - MARGIN);
        let _ = writeln!(out, "<line x1=\"{left}\" y1=\"{at}\" x2=\"{right}\" y2=\"{at}\" stroke=\"#ddd\"/>");
        let _ = writeln!(out, "<text x=\"{}\" y=\"{at}\" text-anchor=\"end\">{}</text>", left - 4.0, tenth * 10);
    }
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">resident bytes per token and layer</text>",
        WIDTH / 2.0,
        HEIGHT - 16.0
    );
    let _ = writeln!(out, "<text x=\"14\" y=\"{}\">accuracy, % of items, mean over contexts</text>", MARGIN - 24.0);
}

/// Writes the marks of one budget.
fn marks(out: &mut String, table: &Comparison, budget: &str, colour: &str) {
    let mut methods: Vec<&str> = Vec::new();
    for row in table.rows.iter().filter(|row| row.budget == budget && row.method != FULL) {
        if methods.contains(&row.method.as_str()) {
            continue;
        }
        methods.push(&row.method);
        let of = |r: &&Row| r.method == row.method && r.budget == budget && r.counts();
        let same: Vec<_> = table.rows.iter().filter(of).collect();
        let n = same.len() as f64;
        let accuracy = same.iter().map(|r| r.accuracy).sum::<f64>() / n;
        let bytes = same.iter().map(|r| r.resident_bytes_per_token).sum::<f64>() / n;
        let (cx, cy) = (x(bytes), y(accuracy));
        let _ = writeln!(out, "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"3\" fill=\"{colour}\"/>");
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\" font-size=\"8\">{}</text>",
            cx + 4.0,
            cy - 3.0,
            row.method
        );
    }
}
