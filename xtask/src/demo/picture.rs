//! Draws the output of a command as a terminal shows it.

use std::fmt::Write;
use std::time::Duration;

/// The size of a letter and the margin, in pixels.
const WIDTH: f64 = 7.2;
const HEIGHT: usize = 16;
const MARGIN: usize = 16;

/// Hides a line until its time. A reader that plays no animations, or wants none, shows all lines
/// at once.
const STYLE: &str = "<style>text{animation:line 1ms backwards}@keyframes line{from{opacity:0}}\
                     @media(prefers-reduced-motion:reduce){text{animation:none}}</style>";

/// Returns a moving picture in SVG of a command and the lines that it printed, each after that
/// time.
pub(super) fn svg(command: &str, printed: &[(Duration, String)]) -> String {
    let first = format!("$ {command}");
    let printed = printed.iter().map(|(after, line)| (*after, line.as_str()));
    let lines: Vec<_> = std::iter::once((Duration::ZERO, first.as_str()))
        .chain(printed)
        .collect();
    let columns = lines
        .iter()
        .map(|(_, line)| line.chars().count())
        .max()
        .unwrap_or_default();
    let width = (columns as f64 * WIDTH).ceil() as usize + 2 * MARGIN;
    let height = lines.len() * HEIGHT + 2 * MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         role=\"img\" aria-label=\"{}\">\n{STYLE}\n<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#1b1f27\"/>\n\
         <g font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"12\" fill=\"#d5d9e0\">\n",
        escaped(command)
    );
    for (row, (after, line)) in lines
        .iter()
        .enumerate()
        .filter(|(_, (_, line))| !line.is_empty())
    {
        let y = MARGIN + row * HEIGHT + 12;
        let colour = colour(row, line)
            .map(|colour| format!(" fill=\"{colour}\""))
            .unwrap_or_default();
        // The width keeps columns in line, whichever font a reader has.
        let length = line.chars().count() as f64 * WIDTH;
        // Writing to a string cannot fail.
        let _written = writeln!(
            svg,
            "<text x=\"{MARGIN}\" y=\"{y}\" textLength=\"{length:.1}\" lengthAdjust=\"spacingAndGlyphs\"{colour} \
             style=\"animation-delay:{:.2}s\">{}</text>",
            after.as_secs_f64(),
            escaped(line)
        );
    }
    svg + "</g>\n</svg>\n"
}

/// Returns the colour of a line that stands out.
fn colour(row: usize, line: &str) -> Option<&'static str> {
    match line {
        _ if row == 0 => Some("#8fb8ff"),
        line if line.starts_with('[') || line.ends_with(" wrong") || line.ends_with(" failed") => {
            Some("#8fd18f")
        }
        _ => None,
    }
}

/// Escapes what XML gives a meaning to. Spaces become such that no reader drops.
fn escaped(text: &str) -> String {
    let text = text.replace(' ', "\u{a0}");
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picture_holds_all_lines_and_fits_the_longest() {
        let lines = [
            (100, "[ 0.1 s] a <b> & c"),
            (110, ""),
            (2_500, "  indented"),
        ];
        let svg = svg(
            "demo",
            &lines.map(|(after, line)| (Duration::from_millis(after), line.to_owned())),
        );
        assert!(svg.contains("width=\"162\" height=\"96\""), "{svg}");
        assert!(
            svg.contains(">[\u{a0}0.1\u{a0}s]\u{a0}a\u{a0}&lt;b&gt;\u{a0}&amp;\u{a0}c</text>")
                && svg.contains(">\u{a0}\u{a0}indented</text>"),
            "{svg}"
        );
        assert_eq!(
            svg.matches("<text ").count(),
            3,
            "the command and two lines that are not empty"
        );
        assert_eq!(svg.matches("#8fd18f").count(), 1);
        assert!(
            svg.contains("animation-delay:0.10s\">[")
                && svg.contains("animation-delay:2.50s\">\u{a0}"),
            "{svg}"
        );
        assert!(!svg.contains("script"));
    }
}
