//! Pictures of a result file, as SVG.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::ops::Range;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::failure::{Doing as _, Failure, Result};
use crate::record::{Measurement, Results, median};
use crate::scenarios::{Scenario, round_trip};

/// Points of a line, in any order.
type Points = Vec<(f64, f64)>;
/// Lines, by the name in the legend.
type Lines = BTreeMap<String, Points>;

/// Draws everything that `results` has data for, into files in `folder`: how latencies are
/// distributed, a picture for each workload, and, if round trips were measured with several numbers
/// of connections, how rate and latency grow with them. Returns the names of the files.
///
/// # Errors
///
/// When nothing can be drawn, or the files cannot be written.
pub(crate) fn draw(results: &Results, folder: &Path) -> Result<Vec<String>> {
    fs::create_dir_all(folder).doing(|| format!("making {}", folder.display()))?;
    let mut drawn = Vec::new();
    for (scenario, lines) in distributions(&results.measurements) {
        let axes = Axes {
            title: &format!("{scenario}: round trips"),
            x: "of all round trips, this part takes longer",
            y: "µs",
            backwards: true,
        };
        let name = format!("latency-{scenario}.svg").replace('@', "-at-");
        drawn.push(picture(folder, name, &[(axes, lines)])?);
    }
    let (rates, tails) = growth(&results.measurements);
    if rates.values().any(|points| points.len() > 1) {
        let axes = |title, y| Axes { title, x: "connections", y, backwards: false };
        let charts = [
            (axes("Round trips per second", "per second"), rates),
            (axes("99th percentile of round trips", "µs"), tails),
        ];
        drawn.push(picture(folder, "connections.svg".to_owned(), &charts)?);
    }
    if drawn.is_empty() {
        return Err(Failure::new("the file has no round trips to draw"));
    }
    Ok(drawn)
}

/// What a line stands for.
fn name(measurement: &Measurement) -> String {
    match &measurement.beside[..] {
        "alone" => measurement.path.clone(),
        loops => format!("{} beside {loops}", measurement.path),
    }
}

/// By workload: for each line, which part of all round trips takes longer than how many
/// microseconds. All rounds together are one line.
fn distributions(measurements: &[Measurement]) -> BTreeMap<String, Lines> {
    let mut counts: BTreeMap<String, BTreeMap<String, BTreeMap<u64, u64>>> = BTreeMap::new();
    for measurement in measurements {
        let Some(rtt) = &measurement.rtt else { continue };
        if rtt.histogram_ns.is_empty() {
            continue;
        }
        let lines = counts.entry(measurement.scenario.clone()).or_default();
        let line = lines.entry(name(measurement)).or_default();
        for &(latency_ns, count) in &rtt.histogram_ns {
            *line.entry(latency_ns).or_default() += count;
        }
    }
    let points = |counts: BTreeMap<u64, u64>| {
        let all: u64 = counts.values().sum();
        let mut longer = all;
        let mut points = Points::new();
        for (latency_ns, count) in counts {
            points.push((longer as f64 / all as f64, latency_ns as f64 / 1e3));
            longer -= count;
        }
        points
    };
    let lines = |lines: BTreeMap<String, BTreeMap<u64, u64>>| {
        lines.into_iter().map(|(name, counts)| (name, points(counts))).collect()
    };
    counts.into_iter().map(|(scenario, all)| (scenario, lines(all))).collect()
}

/// Rates and 99th percentiles in microseconds by the number of connections, each the median of the
/// rounds.
fn growth(measurements: &[Measurement]) -> (Lines, Lines) {
    let mut cells: BTreeMap<(String, u32), (Vec<f64>, Vec<f64>)> = BTreeMap::new();
    for measurement in measurements {
        let scenario: std::result::Result<Scenario, String> = measurement.scenario.parse();
        let Ok(Scenario::RoundTrip { connections, bytes: round_trip::MESSAGE_BYTES }) = scenario
        else {
            continue;
        };
        let (rates, tails) = cells.entry((name(measurement), connections)).or_default();
        rates.extend(measurement.requests_per_s);
        tails.extend(measurement.rtt.as_ref().map(|rtt| rtt.p99_ns as f64 / 1e3));
    }
    let (mut all_rates, mut all_tails) = (Lines::new(), Lines::new());
    for ((name, connections), (rates, tails)) in cells {
        for (lines, values) in [(&mut all_rates, rates), (&mut all_tails, tails)] {
            let point = median(values).map(|value| (f64::from(connections), value));
            lines.entry(name.clone()).or_default().extend(point);
        }
    }
    (all_rates, all_tails)
}

/// What a chart shows. Both axes are logarithmic.
struct Axes<'a> {
    title: &'a str,
    x: &'a str,
    y: &'a str,
    /// Large values of x are on the left.
    backwards: bool,
}

/// Draws charts side by side. Returns the name of the file.
fn picture(folder: &Path, name: String, charts: &[(Axes<'_>, Lines)]) -> Result<String> {
    let path = folder.join(&name);
    let width = WIDTH * u32::try_from(charts.len()).expect("two at most");
    let area = SVGBackend::new(&path, (width, HEIGHT)).into_drawing_area();
    let parts = area.split_evenly((1, charts.len()));
    let draw_all = || -> std::result::Result<(), Box<dyn Error>> {
        area.fill(&WHITE)?;
        for (part, (axes, lines)) in parts.iter().zip(charts) {
            chart(part, axes, lines)?;
        }
        area.present()?;
        Ok(())
    };
    draw_all().map_err(|error| Failure::new(format!("drawing {}: {error}", path.display())))?;
    Ok(name)
}

fn chart(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    axes: &Axes<'_>,
    lines: &Lines,
) -> std::result::Result<(), Box<dyn Error>> {
    let range = |values: &dyn Fn(&(f64, f64)) -> f64| -> Range<f64> {
        let all = || lines.values().flatten().map(values).filter(|value| *value > 0.0);
        let (low, high) = (all().fold(f64::MAX, f64::min), all().fold(f64::MIN, f64::max));
        if low > high { 1.0..10.0 } else { low / MARGIN..high * MARGIN }
    };
    let (xs, ys) = (range(&|point| point.0), range(&|point| point.1));
    let xs = if axes.backwards { xs.end..xs.start } else { xs };
    let mut chart = ChartBuilder::on(area)
        .caption(axes.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(76)
        .build_cartesian_2d(xs.log_scale(), ys.log_scale())?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(axes.x).y_desc(axes.y).light_line_style(TRANSPARENT);
    let plain = |value: &f64| format!("{value}");
    let percent = |x: &f64| format!("{} %", 100.0 * x);
    mesh.y_label_formatter(&plain);
    if axes.backwards {
        mesh.x_label_formatter(&percent)
    } else {
        mesh.x_label_formatter(&plain)
    };
    mesh.draw()?;
    for (index, (name, points)) in lines.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let mut points = points.clone();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    // Where no line is likely to be.
    let legend = match axes.backwards {
        true => SeriesLabelPosition::UpperLeft,
        false => SeriesLabelPosition::LowerRight,
    };
    chart.configure_series_labels().position(legend).background_style(WHITE.mix(0.8)).draw()?;
    Ok(())
}

/// Pixels of a chart.
const WIDTH: u32 = 640;
const HEIGHT: u32 = 420;
/// Room around the lines, as a factor.
const MARGIN: f64 = 1.15;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latency::Recorder;
    use crate::record::tests::{machine, measurement};

    fn results(scenarios: &[&str]) -> Results {
        let mut recorder = Recorder::new();
        recorder.record(1);
        let measured = scenarios.iter().zip(1..).map(|(scenario, round)| Measurement {
            rtt: recorder.summary(),
            ..measurement(scenario, "smcgate", round)
        });
        Results { machine: machine(), measurements: measured.collect() }
    }

    /// A picture that shows other figures than the table would be worse than none.
    #[test]
    fn lines_are_made_of_what_was_measured() {
        let mut all = results(&["RR-1", "RR-1", "RR-32"]);
        for (measurement, rate) in all.measurements.iter_mut().zip([10.0, 30.0, 90.0]) {
            measurement.requests_per_s = Some(rate);
            let rtt = measurement.rtt.as_mut().unwrap();
            rtt.histogram_ns = vec![(1_000, 3), (5_000, 1)];
        }
        let path = all.measurements[0].path.clone();
        let lines = distributions(&all.measurements);
        assert_eq!(lines["RR-1"][&path], [(1.0, 1.0), (0.25, 5.0)]);
        let (rates, _) = growth(&all.measurements);
        assert_eq!(rates[&path], [(1.0, 20.0), (32.0, 90.0)]);

        let folder = std::env::temp_dir().join(format!("smcgate-plot-{}", std::process::id()));
        let drawn = draw(&all, &folder).unwrap();
        assert_eq!(drawn, ["latency-RR-1.svg", "latency-RR-32.svg", "connections.svg"]);
        for name in drawn {
            let text = fs::read_to_string(folder.join(name)).unwrap();
            assert!(text.starts_with("<svg") && text.contains(&path));
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_without_round_trips_is_said_to_be_one() {
        let folder = std::env::temp_dir();
        assert!(draw(&results(&[]), &folder).is_err());
    }
}
