//! How a page keeps up with its reader: the frames that the browser draws, and the work of the
//! page's thread in them.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::agent::{DEADLINE, wait_until};

use crate::ui::browser::Browser;

/// Has the page mark each frame in the browser's trace.
const MARK_FRAMES: &str =
    "const mark = () => { performance.mark('kpx frame'); requestAnimationFrame(mark) };
    window.isMarking ||= (mark(), true); performance.mark('kpx begin')";

/// Prints how a page fares meanwhile: the time between frames, the work of the page's thread in
/// each, and its tasks. A clock measures them, so others on the machine lengthen them; but the
/// processor time of the work, which follows, is the page's alone.
pub(crate) fn print(
    browser: &Browser,
    what: &str,
    work: impl FnOnce() -> Result<()>,
) -> Result<()> {
    browser.eval(MARK_FRAMES)?;
    work()?;
    browser.eval("performance.mark('kpx end')")?;
    let mut trace = Vec::new();
    wait_until(DEADLINE, "the trace of that time is there", || {
        trace.extend(browser.trace()?);
        Ok(trace.iter().any(|event| event["name"] == "kpx end"))
    })?;
    let named = |name: &'static str| trace.iter().filter(move |event| event["name"] == name);
    let begin = named("kpx begin").next_back().context("no begin")?;
    let is_in = |event: &&Value| {
        event["pid"] == begin["pid"] && event["tid"] == begin["tid"] && at(event) >= at(begin)
    };
    let frames: Vec<f64> = named("kpx frame").filter(is_in).map(at).collect();
    let millis = |task: &Value, field: &str| task[field].as_f64().unwrap_or_default() / 1e3;
    let tasks = named("RunTask").filter(is_in);
    let tasks: Vec<_> = tasks
        .map(|task| (at(task), [millis(task, "dur"), millis(task, "tdur")]))
        .collect();
    ensure!(
        frames.len() > 30 && tasks.len() > 30,
        "{} frames, {} tasks",
        frames.len(),
        tasks.len()
    );
    ensure!(
        tasks.iter().any(|task| task.1[1] > 0.0),
        "the trace has no processor time"
    );
    let in_frame = |ends: &[f64], kind: usize| {
        tasks
            .iter()
            .filter(|(start, _)| (ends[0]..ends[1]).contains(start))
            .map(|task| task.1[kind])
            .sum()
    };
    let long = tasks
        .iter()
        .filter(|(_, [clock, _])| *clock > 1e3 / 60.0)
        .count();
    println!(
        "{what}: median, 95 %, longest: frames after {}; work in a frame {}, on the processor {}; a task {}; {long} of {} tasks over a frame",
        spread(
            frames
                .windows(2)
                .map(|ends| (ends[1] - ends[0]) / 1e3)
                .collect()
        ),
        spread(frames.windows(2).map(|ends| in_frame(ends, 0)).collect()),
        spread(frames.windows(2).map(|ends| in_frame(ends, 1)).collect()),
        spread(tasks.iter().map(|task| task.1[0]).collect()),
        tasks.len(),
    );
    Ok(())
}

/// The start of an event, in microseconds.
fn at(event: &Value) -> f64 {
    event["ts"].as_f64().unwrap_or_default()
}

/// Formats the median, the 95th of a hundred and the longest of some times.
fn spread(mut millis: Vec<f64>) -> String {
    millis.sort_by(f64::total_cmp);
    let at = |percent: usize| {
        millis
            .get(millis.len() * percent / 100)
            .or(millis.last())
            .copied()
            .unwrap_or_default()
    };
    format!("{:.1}, {:.1}, {:.1} ms", at(50), at(95), at(100))
}
