//! Drawings of the figures that matter most.

use std::fs;
use std::path::Path as FilePath;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;
use tools::bench::{Key, MANY_SERVICES, Mode, Path, Spread, Variant};

use super::Cells;
use super::figures::grouped;

pub(super) const SIZE: (u32, u32) = (900, 420);
pub(super) const FONT: &str = "sans-serif";
/// In this order from left to right, each with its colour; those that colour-blind people tell
/// apart.
const COLOURS: [(Variant, RGBColor); 12] = [
    (Variant::Direct, RGBColor(90, 90, 90)),
    (Variant::IptablesLegacy, RGBColor(213, 94, 0)),
    (Variant::IptablesNft, RGBColor(230, 159, 0)),
    (Variant::Nftables, RGBColor(86, 180, 233)),
    (Variant::KubeProxyIptables, RGBColor(204, 121, 167)),
    (Variant::KubeProxyNftables, RGBColor(0, 114, 178)),
    (Variant::Kpx, RGBColor(0, 158, 115)),
    (Variant::KpxB, RGBColor(0, 80, 60)),
    (Variant::KpxOff, RGBColor(150, 150, 60)),
    (Variant::KpxSocketAll, RGBColor(90, 140, 40)),
    (Variant::Beside, RGBColor(130, 130, 130)),
    (Variant::Limit, RGBColor(20, 20, 20)),
];

const GREY: RGBColor = RGBColor(190, 190, 190);
/// The groups of the first drawing.
const GROUPS: [(Path, &str); 8] = [
    (Path::Routable, "pods, untracked"),
    (Path::Local, "pods, tracked"),
    (Path::Calico, "Calico"),
    (Path::KubeRouter, "kube-router"),
    (Path::Remote, "other node"),
    (Path::Host, "node → pod"),
    (Path::Outside, "node port"),
    (Path::OutsideRemote, "port, elsewhere"),
];
/// The drawing of each path, by the name of its file.
const FILES: [(Path, &str); 9] = [
    (Path::Local, "local"),
    (Path::Remote, "remote"),
    (Path::Host, "host"),
    (Path::Outside, "outside"),
    (Path::Routable, "routable"),
    (Path::Calico, "calico"),
    (Path::KubeRouter, "kube-router"),
    (Path::Overlay, "overlay"),
    (Path::OutsideRemote, "outside-remote"),
];

/// The values of bars or points.
type Marks = Vec<(usize, Spread)>;

/// The drawing that stands beside the first table.
pub(super) const OVERVIEW: &str = "overview.svg";

/// Draws what was measured, and nothing that was measured before. Returns the titles and files of
/// all but the first drawing.
pub(super) fn draw(cells: &Cells, folder: &FilePath) -> Result<Vec<(String, String)>> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "svg") {
            fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    overview(cells, &folder.join(OVERVIEW)).with_context(|| format!("draw {OVERVIEW}"))?;
    let mut drawn = Vec::new();
    for services in [MANY_SERVICES, 1] {
        let count = grouped(services as u64);
        let with = if services == 1 {
            "the measured Services alone".into()
        } else {
            format!("{count} Services")
        };
        for (path, name) in FILES {
            let title = format!("{path}, {with}");
            let file = format!("{name}-{services}.svg");
            let is_drawn = bars(
                cells,
                path,
                services,
                &format!("{title}: ratio to direct"),
                &folder.join(&file),
            );
            if is_drawn.with_context(|| format!("draw {file}"))? {
                drawn.push((title, file));
            }
        }
    }
    for (mode, name) in [(Mode::TcpCrr, "services-crr"), (Mode::TcpRr, "services-rr")] {
        let title = format!("{mode}, {}, by Services", Path::Local);
        let file = format!("{name}.svg");
        let is_drawn = lines(
            cells,
            mode,
            &format!("{title}: ratio to direct"),
            &folder.join(&file),
        );
        if is_drawn.with_context(|| format!("draw {file}"))? {
            drawn.push((title, file));
        }
    }
    Ok(drawn)
}

/// A variant's bars in each group.
type Series = Vec<(Variant, RGBColor, Marks)>;

/// Ratios of the variants of the first table, in groups by path: short connections above, open ones
/// below.
fn overview(cells: &Cells, file: &FilePath) -> Result<()> {
    const VARIANTS: [Variant; 5] = [
        Variant::Control,
        Variant::Nftables,
        Variant::KpxOff,
        Variant::Kpx,
        Variant::Limit,
    ];
    const MODES: [Mode; 2] = [Mode::TcpCrr, Mode::TcpRr];
    let ratio = |path, mode, variant| {
        cells.get(&Key {
            services: MANY_SERVICES,
            path,
            mode,
            variant,
        })
    };
    let groups: Vec<_> = GROUPS
        .into_iter()
        .filter(|(path, _)| ratio(*path, MODES[0], Variant::Direct).is_some())
        .collect();
    if groups.is_empty() {
        return Ok(());
    }
    let root = SVGBackend::new(file, (SIZE.0, SIZE.1 * 3 / 2)).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    for (area, mode) in root.split_evenly((MODES.len(), 1)).iter().zip(MODES) {
        let colour = |variant| {
            COLOURS
                .into_iter()
                .find(|(known, _)| *known == variant)
                .map_or(GREY, |(_, own)| own)
        };
        let marks = |variant| {
            let mark = |(at, (path, _)): (usize, &(Path, &str))| {
                Some((at, ratio(*path, mode, variant)?.ratio))
            };
            groups
                .iter()
                .enumerate()
                .filter_map(mark)
                .collect::<Marks>()
        };
        let series: Series = VARIANTS
            .map(|variant| (variant, colour(variant), marks(variant)))
            .into();
        let names: Vec<_> = groups.iter().map(|(_, name)| *name).collect();
        let title = format!(
            "{mode}, {} Services: ratio to direct",
            grouped(MANY_SERVICES as u64)
        );
        grouped_bars(area, &title, &names, &series)?;
    }
    root.present().map_err(failed)
}

/// Ratios of all variants, in groups by mode. Returns false if none was measured, as [`lines`]
/// does.
fn bars(cells: &Cells, path: Path, services: usize, title: &str, file: &FilePath) -> Result<bool> {
    const MODES: [(Mode, &str); 10] = [
        (Mode::TcpCrr, "TCP conn/req/resp"),
        (Mode::TcpRr, "TCP req/resp"),
        (Mode::TcpRrYoung, "TCP, young"),
        (Mode::TcpStream, "TCP stream"),
        (Mode::UdpRr, "UDP req/resp"),
        (Mode::UdpRrYoung, "UDP, young"),
        (Mode::UdpStream, "UDP stream"),
        (Mode::UdpPps, "UDP packets"),
        (Mode::UdpDns, "UDP DNS"),
        (Mode::TcpMany, "TCP, 10,000 open"),
    ];
    let ratio = |mode, variant| {
        cells
            .get(&Key {
                services,
                path,
                mode,
                variant,
            })
            .map(|cell| cell.ratio)
    };
    let modes: Vec<_> = MODES
        .into_iter()
        .filter(|(mode, _)| ratio(*mode, Variant::Direct).is_some())
        .collect();
    let series = COLOURS.map(|(variant, colour)| {
        let marks: Marks = modes
            .iter()
            .enumerate()
            .filter_map(|(at, (mode, _))| Some((at, ratio(*mode, variant)?)))
            .collect();
        (variant, colour, marks)
    });
    let series: Series = series
        .into_iter()
        .filter(|(.., marks)| !marks.is_empty())
        .collect();
    if series.is_empty() {
        return Ok(false);
    }
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    let names: Vec<_> = modes.iter().map(|(_, name)| *name).collect();
    grouped_bars(&root, title, &names, &series)?;
    root.present().map_err(failed)?;
    Ok(true)
}

/// Draws bars side by side, with whiskers for the middle half of rounds.
fn grouped_bars(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    title: &str,
    names: &[&str],
    series: &[(Variant, RGBColor, Marks)],
) -> Result<()> {
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 18))
        .margin(10)
        .x_label_area_size(30)
        .y_label_area_size(50)
        .build_cartesian_2d(0.0..names.len() as f64, 0.0..highest(series) * 1.25)
        .map_err(failed)?;
    let name = |x: &f64| {
        let middle = (x.fract() - 0.5).abs() < 1e-6;
        names
            .get(*x as usize)
            .filter(|_| middle)
            .map_or_else(String::new, |name| (*name).to_owned())
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * names.len() + 1)
        .x_label_formatter(&name)
        .draw()
        .map_err(failed)?;
    let width = 0.86 / series.len() as f64;
    for (nth, &(variant, colour, ref marks)) in series.iter().enumerate() {
        let left = |group: usize| group as f64 + 0.07 + nth as f64 * width;
        let bar = |(group, ratio): &(usize, Spread)| {
            Rectangle::new(
                [
                    (left(*group), 0.0),
                    (left(*group) + width * 0.9, ratio.median),
                ],
                colour.filled(),
            )
        };
        chart
            .draw_series(marks.iter().map(bar))
            .map_err(failed)?
            .label(variant.to_string())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        let whisker = |(group, ratio): &(usize, Spread)| {
            let middle = left(*group) + width * 0.45;
            PathElement::new([(middle, ratio.low), (middle, ratio.high)], BLACK.mix(0.6))
        };
        chart
            .draw_series(marks.iter().map(whisker))
            .map_err(failed)?;
    }
    legend(&mut chart)
}

/// One variant's ratio, by how many Services there are.
fn lines(cells: &Cells, mode: Mode, title: &str, file: &FilePath) -> Result<bool> {
    let marks = |variant| {
        let own = |(key, _): &(&Key, _)| {
            key.path == Path::Local && key.mode == mode && key.variant == variant
        };
        cells
            .iter()
            .filter(own)
            .map(|(key, cell)| (key.services, cell.ratio))
            .collect::<Marks>()
    };
    let series = COLOURS.map(|(variant, colour)| (variant, colour, marks(variant)));
    let series: Vec<_> = series
        .into_iter()
        .filter(|(.., marks)| marks.len() > 1)
        .collect();
    if series.is_empty() {
        return Ok(false);
    }
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, (FONT, 18))
        .margin(10)
        .x_label_area_size(30)
        .y_label_area_size(50)
        .build_cartesian_2d((0.8..160_000.0).log_scale(), 0.0..highest(&series) * 1.25)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_label_formatter(&|x: &f64| grouped(x.round() as u64))
        .draw()
        .map_err(failed)?;
    for (variant, colour, marks) in &series {
        let points = || {
            marks
                .iter()
                .map(|(services, ratio)| (*services as f64, ratio))
        };
        chart
            .draw_series(LineSeries::new(
                points().map(|(x, ratio)| (x, ratio.median)),
                colour.stroke_width(2),
            ))
            .map_err(failed)?
            .label(variant.to_string())
            .legend(|(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        let whisker = |(x, ratio): (f64, &Spread)| {
            PathElement::new([(x, ratio.low), (x, ratio.high)], colour.mix(0.6))
        };
        chart.draw_series(points().map(whisker)).map_err(failed)?;
        chart
            .draw_series(
                points().map(|(x, ratio)| Circle::new((x, ratio.median), 3, colour.filled())),
            )
            .map_err(failed)?;
    }
    legend(&mut chart)?;
    root.present().map_err(failed)?;
    Ok(true)
}

fn legend<'a, 'b: 'a, X: Ranged<ValueType = f64>>(
    chart: &mut ChartContext<
        'a,
        SVGBackend<'b>,
        Cartesian2d<X, plotters::coord::types::RangedCoordf64>,
    >,
) -> Result<()> {
    let labels = &mut chart.configure_series_labels();
    let labels = labels
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .label_font((FONT, 12));
    labels.draw().map_err(failed)
}

fn highest(series: &[(Variant, RGBColor, Marks)]) -> f64 {
    series
        .iter()
        .flat_map(|(.., marks)| marks)
        .map(|(_, ratio)| ratio.high)
        .fold(1.0, f64::max)
}

pub(super) fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("{error}")
}
