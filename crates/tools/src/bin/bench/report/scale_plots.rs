//! The drawings of docs/scale.md.

use std::fs;
use std::path::Path as FilePath;

use anyhow::{Context, Result};
use plotters::prelude::*;
use tools::scale::{By, What};

use super::figures::grouped;
use super::plots::{FONT, SIZE, failed};
use super::scale::{Figures, words};

/// Those that colour-blind people tell apart.
const COLOURS: [(By, RGBColor); 6] = [
    (By::Kpx, RGBColor(0, 158, 115)),
    (By::Nftables, RGBColor(86, 180, 233)),
    (By::IptablesLegacy, RGBColor(213, 94, 0)),
    (By::IptablesNft, RGBColor(230, 159, 0)),
    (By::KubeProxyIptables, RGBColor(204, 121, 167)),
    (By::KubeProxyNftables, RGBColor(0, 114, 178)),
];
/// The drawings with a bar for each means in each size.
const BARS: [Bars; 4] = [
    Bars {
        what: What::Programmed,
        title: "lists in, or tool started → programmed, in seconds",
        file: "programmed.svg",
        unit: 1e3,
        least: 0.1,
    },
    Bars {
        what: What::FirstFollowsP50,
        title: "one endpoint's change → first packet that follows, median, in seconds",
        file: "first-follows.svg",
        unit: 1e3,
        least: 0.000_1,
    },
    Bars {
        what: What::PeakResident,
        title: "memory of the agent or tool at its peak, in MiB",
        file: "peak-memory.svg",
        unit: 1.0,
        least: 10.0,
    },
    Bars {
        what: What::KernelMemory,
        title: "memory of the kernel for maps or rules, in MiB",
        file: "kernel-memory.svg",
        unit: 1.0,
        least: 10.0,
    },
];

/// A drawing on a logarithmic scale.
struct Bars {
    what: What,
    title: &'static str,
    file: &'static str,
    /// The unit of the scale in that of the figure.
    unit: f64,
    /// The value at the foot of the bars.
    least: f64,
}

/// A line: what it is of, its colour, and its points by number of Services.
type Line = (String, RGBColor, Vec<(f64, f64)>);

/// Draws all that was measured, and returns the titles and files.
pub(super) fn draw(figures: &Figures, folder: &FilePath) -> Result<Vec<(String, String)>> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let mut drawn = Vec::new();
    for bars in &BARS {
        let Bars { title, file, .. } = *bars;
        if draw_bars(figures, bars, &folder.join(file)).with_context(|| format!("draw {file}"))? {
            drawn.push((title.to_owned(), file.to_owned()));
        }
    }
    for (what, title, file) in [
        (
            What::FirstP50,
            "handshake of a connection, median, in µs",
            "first-p50.svg",
        ),
        (
            What::FirstP99,
            "handshake of a connection, 99th percentile, in µs",
            "first-p99.svg",
        ),
    ] {
        if lines(figures, what, title, &folder.join(file))
            .with_context(|| format!("draw {file}"))?
        {
            drawn.push((title.to_owned(), file.to_owned()));
        }
    }
    Ok(drawn)
}

fn colour(by: By) -> RGBColor {
    COLOURS
        .into_iter()
        .find(|(known, _)| *known == by)
        .map_or(BLACK, |(_, colour)| colour)
}

/// Draws a bar for each means in each size. Returns false if there is nothing to draw.
fn draw_bars(figures: &Figures, bars: &Bars, file: &FilePath) -> Result<bool> {
    let &Bars {
        what,
        title,
        unit,
        least,
        ..
    } = bars;
    let sizes = figures.sizes(what);
    let by = figures.by(what);
    let value = |by: By, size| figures.value(by, size, what).map(|value| value / unit);
    let all = sizes
        .iter()
        .flat_map(|size| by.iter().filter_map(|by| value(*by, *size)));
    let Some(most) = all.reduce(f64::max).map(|most| most.max(least)) else {
        return Ok(false);
    };
    // The names stand above the bars, whose logarithms fill four fifths.
    let top = (most * (most / least).powf(0.25)).max(least * 10.0);
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, (FONT, 18))
        .margin(10)
        .x_label_area_size(30)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..sizes.len() as f64, (least..top).log_scale())
        .map_err(failed)?;
    let names: Vec<_> = sizes.iter().map(|size| words(*size)).collect();
    let name = |x: &f64| {
        let is_middle = (x.fract() - 0.5).abs() < 1e-6;
        names
            .get(*x as usize)
            .filter(|_| is_middle)
            .cloned()
            .unwrap_or_default()
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * names.len() + 1)
        .x_label_formatter(&name)
        .draw()
        .map_err(failed)?;
    let width = 0.86 / by.len() as f64;
    for (nth, by) in by.iter().enumerate() {
        let left = |group: usize| group as f64 + 0.07 + nth as f64 * width;
        let bar = |(group, size): (usize, &(u32, u32))| {
            let height = value(*by, *size)?.max(least);
            let corners = [(left(group), least), (left(group) + width * 0.9, height)];
            Some(Rectangle::new(corners, colour(*by).filled()))
        };
        let own = colour(*by);
        chart
            .draw_series(sizes.iter().enumerate().filter_map(bar))
            .map_err(failed)?
            .label(by.to_string())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], own.filled()));
    }
    let labels = &mut chart.configure_series_labels();
    let labels = labels
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85));
    labels.label_font((FONT, 12)).draw().map_err(failed)?;
    root.present().map_err(failed)?;
    Ok(true)
}

/// Draws a line for each means by the number of Services, both scales logarithmic.
fn lines(figures: &Figures, what: What, title: &str, file: &FilePath) -> Result<bool> {
    let line = |by: By| {
        let point = |size: (u32, u32)| Some((f64::from(size.0), figures.value(by, size, what)?));
        (
            by.to_string(),
            colour(by),
            figures.sizes(what).into_iter().filter_map(point).collect(),
        )
    };
    let lines: Vec<Line> = figures
        .by(what)
        .into_iter()
        .map(line)
        .filter(|(.., points): &Line| points.len() > 1)
        .collect();
    let values = || lines.iter().flat_map(|(.., points)| points);
    let (Some(least), Some(most)) = (
        values().map(|point| point.1).reduce(f64::min),
        values().map(|point| point.1).reduce(f64::max),
    ) else {
        return Ok(false);
    };
    let last = values().map(|point| point.0).fold(1.0, f64::max);
    let first = values().map(|point| point.0).fold(last, f64::min);
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, (FONT, 18))
        .margin(10)
        .x_label_area_size(30)
        .y_label_area_size(60)
        .build_cartesian_2d(
            (first * 0.8..last * 1.6).log_scale(),
            (least * 0.5..most * 3.0).log_scale(),
        )
        .map_err(failed)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("Services")
        .x_label_formatter(&|x: &f64| grouped(x.round() as u64))
        .draw()
        .map_err(failed)?;
    for (name, colour, points) in lines {
        chart
            .draw_series(LineSeries::new(
                points.iter().copied(),
                colour.stroke_width(2),
            ))
            .map_err(failed)?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        chart
            .draw_series(
                points
                    .into_iter()
                    .map(|point| Circle::new(point, 3, colour.filled())),
            )
            .map_err(failed)?;
    }
    let labels = &mut chart.configure_series_labels();
    let labels = labels
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85));
    labels.label_font((FONT, 12)).draw().map_err(failed)?;
    root.present().map_err(failed)?;
    Ok(true)
}
