//! Draws the output of a command as a terminal shows it.

use std::fmt::Write;

/// The size of a letter and the margin, in pixels.
const WIDTH: f64 = 7.2;
const HEIGHT: usize = 16;
const MARGIN: usize = 16;

/// Returns a picture in SVG of a command and the text that it printed.
pub(super) fn svg(command: &str, text: &str) -> String {
    let first = format!("$ {command}");
    let lines: Vec<_> = std::iter::once(first.as_str()).chain(text.lines()).collect();
    let columns = lines.iter().map(|line| line.chars().count()).max().unwrap_or_default();
    let (width, height) = ((columns as f64 * WIDTH).ceil() as usize + 2 * MARGIN, lines.len() * HEIGHT + 2 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         role=\"img\" aria-label=\"{}\">\n<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#1b1f27\"/>\n\
         <g font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"12\" fill=\"#d5d9e0\">\n",
        escaped(command)
    );
    for (row, line) in lines.iter().enumerate().filter(|(_, line)| !line.is_empty()) {
        let y = MARGIN + row * HEIGHT + 12;
        let colour = colour(row, line).map(|colour| format!(" fill=\"{colour}\"")).unwrap_or_default();
        // The width keeps columns in line, whichever font a reader has.
        let length = line.chars().count() as f64 * WIDTH;
        // Writing to a string cannot fail.
        let _written = writeln!(
            svg,
            "<text x=\"{MARGIN}\" y=\"{y}\" textLength=\"{length:.1}\" lengthAdjust=\"spacingAndGlyphs\"{colour}>{}</text>",
            escaped(line)
        );
    }
    svg + "</g>\n</svg>\n"
}

/// Returns the colour of a line that stands out.
fn colour(row: usize, line: &str) -> Option<&'static str> {
    match line {
        _ if row == 0 => Some("#8fb8ff"),
        line if line.starts_with('[') || line.ends_with(" wrong") || line.ends_with(" failed") => Some("#8fd18f"),
        _ => None,
    }
}

/// Escapes what XML gives a meaning to. Spaces become such that no reader drops.
fn escaped(text: &str) -> String {
    let text = text.replace(' ', "\u{a0}");
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picture_holds_all_lines_and_fits_the_longest() {
        let svg = svg("demo", "[ 0.1 s] a <b> & c\n\n  indented\n");
        assert!(svg.contains("width=\"162\" height=\"96\""), "{svg}");
        assert!(
            svg.contains(">[\u{a0}0.1\u{a0}s]\u{a0}a\u{a0}&lt;b&gt;\u{a0}&amp;\u{a0}c</text>")
                && svg.contains(">\u{a0}\u{a0}indented</text>"),
            "{svg}"
        );
        assert_eq!(svg.matches("<text ").count(), 3, "the command and two lines that are not empty");
        assert_eq!(svg.matches("#8fd18f").count(), 1);
    }
}
