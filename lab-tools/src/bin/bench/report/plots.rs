//! Drawings of the figures that matter most.

use std::fs;
use std::path::Path as FilePath;

use anyhow::{Context, Result, anyhow};
use lab_tools::bench::{Key, Mode, Path, Spread, Variant};
use plotters::prelude::*;

use super::Cells;
use super::figures::grouped;

const SIZE: (u32, u32) = (900, 420);
const FONT: &str = "sans-serif";
/// In this order from left to right, each with its colour; those that colour-blind people tell apart.
const COLOURS: [(Variant, RGBColor); 9] = [
    (Variant::Direct, RGBColor(90, 90, 90)),
    (Variant::IptablesLegacy, RGBColor(213, 94, 0)),
    (Variant::IptablesNft, RGBColor(230, 159, 0)),
    (Variant::Nftables, RGBColor(86, 180, 233)),
    (Variant::KubeProxyIptables, RGBColor(204, 121, 167)),
    (Variant::KubeProxyNftables, RGBColor(0, 114, 178)),
    (Variant::Kpx, RGBColor(0, 158, 115)),
    (Variant::KpxFast, RGBColor(0, 90, 60)),
    (Variant::KpxSocket, RGBColor(150, 200, 60)),
];

/// The values of bars or points.
type Marks = Vec<(usize, Spread)>;

pub(super) fn draw(cells: &Cells, folder: &FilePath) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    for services in [1, 10_000] {
        for (path, name) in [
            (Path::Local, "local"),
            (Path::Remote, "remote"),
            (Path::Host, "host"),
            (Path::Outside, "outside"),
            (Path::Routable, "routable"),
        ] {
            let file = folder.join(format!("{name}-{services}.svg"));
            let with = if services == 1 {
                "the measured Services alone".to_owned()
            } else {
                format!("{} Services", grouped(services as u64))
            };
            bars(cells, path, services, &format!("{path}, {with}: ratio to direct"), &file)
                .with_context(|| format!("draw {}", file.display()))?;
        }
    }
    for (mode, name) in [(Mode::TcpCrr, "services-crr"), (Mode::TcpRr, "services-rr")] {
        let file = folder.join(format!("{name}.svg"));
        lines(cells, mode, &format!("{mode}, {}: ratio to direct, by Services", Path::Local), &file)
            .with_context(|| format!("draw {}", file.display()))?;
    }
    Ok(())
}

/// Ratios of all variants, in groups by mode.
fn bars(cells: &Cells, path: Path, services: usize, title: &str, file: &FilePath) -> Result<()> {
    const MODES: [(Mode, &str); 6] = [
        (Mode::TcpCrr, "TCP conn/req/resp"),
        (Mode::TcpRr, "TCP req/resp"),
        (Mode::TcpStream, "TCP stream"),
        (Mode::UdpRr, "UDP req/resp"),
        (Mode::UdpStream, "UDP stream"),
        (Mode::UdpPps, "UDP packets"),
    ];
    let ratio = |mode, variant| cells.get(&Key { services, path, mode, variant }).map(|cell| cell.ratio);
    let modes: Vec<_> = MODES.into_iter().filter(|(mode, _)| ratio(*mode, Variant::Direct).is_some()).collect();
    let series = COLOURS.map(|(variant, colour)| {
        let marks: Marks =
            modes.iter().enumerate().filter_map(|(at, (mode, _))| Some((at, ratio(*mode, variant)?))).collect();
        (variant, colour, marks)
    });
    let series: Vec<_> = series.into_iter().filter(|(.., marks)| !marks.is_empty()).collect();
    if series.is_empty() {
        return Ok(());
    }
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, (FONT, 18))
        .margin(10)
        .x_label_area_size(30)
        .y_label_area_size(50)
        .build_cartesian_2d(0.0..modes.len() as f64, 0.0..highest(&series) * 1.25)
        .map_err(failed)?;
    let name = |x: &f64| {
        let middle = (x.fract() - 0.5).abs() < 1e-6;
        modes.get(*x as usize).filter(|_| middle).map_or_else(String::new, |(_, name)| (*name).to_owned())
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * modes.len() + 1)
        .x_label_formatter(&name)
        .draw()
        .map_err(failed)?;
    let width = 0.86 / series.len() as f64;
    for (nth, (variant, colour, marks)) in series.iter().enumerate() {
        let left = |group: usize| group as f64 + 0.07 + nth as f64 * width;
        let bar = |(group, ratio): &(usize, Spread)| {
            Rectangle::new([(left(*group), 0.0), (left(*group) + width * 0.9, ratio.median)], colour.filled())
        };
        chart
            .draw_series(marks.iter().map(bar))
            .map_err(failed)?
            .label(variant.to_string())
            .legend(|(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        let whisker = |(group, ratio): &(usize, Spread)| {
            let middle = left(*group) + width * 0.45;
            PathElement::new([(middle, ratio.low), (middle, ratio.high)], BLACK.mix(0.6))
        };
        chart.draw_series(marks.iter().map(whisker)).map_err(failed)?;
    }
    legend(&mut chart)?;
    root.present().map_err(failed)
}

/// One variant's ratio, by how many Services there are.
fn lines(cells: &Cells, mode: Mode, title: &str, file: &FilePath) -> Result<()> {
    let marks = |variant| {
        let own = |(key, _): &(&Key, _)| key.path == Path::Local && key.mode == mode && key.variant == variant;
        cells.iter().filter(own).map(|(key, cell)| (key.services, cell.ratio)).collect::<Marks>()
    };
    let series = COLOURS.map(|(variant, colour)| (variant, colour, marks(variant)));
    let series: Vec<_> = series.into_iter().filter(|(.., marks)| marks.len() > 1).collect();
    if series.is_empty() {
        return Ok(());
    }
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, (FONT, 18))
        .margin(10)
        .x_label_area_size(30)
        .y_label_area_size(50)
        .build_cartesian_2d((0.8..80_000.0).log_scale(), 0.0..highest(&series) * 1.25)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_label_formatter(&|x: &f64| grouped(x.round() as u64))
        .draw()
        .map_err(failed)?;
    for (variant, colour, marks) in &series {
        let points = || marks.iter().map(|(services, ratio)| (*services as f64, ratio));
        chart
            .draw_series(LineSeries::new(points().map(|(x, ratio)| (x, ratio.median)), colour.stroke_width(2)))
            .map_err(failed)?
            .label(variant.to_string())
            .legend(|(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        let whisker = |(x, ratio): (f64, &Spread)| PathElement::new([(x, ratio.low), (x, ratio.high)], colour.mix(0.6));
        chart.draw_series(points().map(whisker)).map_err(failed)?;
        chart
            .draw_series(points().map(|(x, ratio)| Circle::new((x, ratio.median), 3, colour.filled())))
            .map_err(failed)?;
    }
    legend(&mut chart)?;
    root.present().map_err(failed)
}

fn legend<'a, X: Ranged<ValueType = f64>>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, plotters::coord::types::RangedCoordf64>>,
) -> Result<()> {
    let labels = &mut chart.configure_series_labels();
    let labels =
        labels.position(SeriesLabelPosition::UpperRight).background_style(WHITE.mix(0.85)).label_font((FONT, 12));
    labels.draw().map_err(failed)
}

fn highest(series: &[(Variant, RGBColor, Marks)]) -> f64 {
    series.iter().flat_map(|(.., marks)| marks).map(|(_, ratio)| ratio.high).fold(1.0, f64::max)
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("{error}")
}
