//! How a page keeps up with its reader: the frames that the browser draws, and the work of the page's thread in them.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::agent::{DEADLINE, wait_until};

use crate::ui::browser::Browser;

/// Has the page mark each frame in the browser's trace.
const MARK_FRAMES: &str = "const mark = () => { performance.mark('kpx frame'); requestAnimationFrame(mark) };
    window.isMarking ||= (mark(), true); performance.mark('kpx begin')";

/// Prints how a page fares meanwhile: the time between frames, the work of the page's thread in each, and its tasks, which
/// nothing interrupts. All are times of a clock, so others on the machine lengthen them.
pub(crate) fn print(browser: &Browser, what: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
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
    let is_in = |event: &&Value| event["pid"] == begin["pid"] && event["tid"] == begin["tid"] && at(event) >= at(begin);
    let frames: Vec<f64> = named("kpx frame").filter(is_in).map(at).collect();
    let tasks: Vec<_> =
        named("RunTask").filter(is_in).map(|task| (at(task), task["dur"].as_f64().unwrap_or_default() / 1e3)).collect();
    ensure!(frames.len() > 30 && tasks.len() > 30, "{} frames, {} tasks", frames.len(), tasks.len());
    let in_frame =
        |ends: &[f64]| tasks.iter().filter(|(start, _)| (ends[0]..ends[1]).contains(start)).map(|task| task.1).sum();
    let long = tasks.iter().filter(|(_, millis)| *millis > 1e3 / 60.0).count();
    println!(
        "{what}: median, 95 %, longest: frames after {}; work in a frame {}; a task {}; {long} of {} tasks over a frame",
        spread(frames.windows(2).map(|ends| (ends[1] - ends[0]) / 1e3).collect()),
        spread(frames.windows(2).map(in_frame).collect()),
        spread(tasks.iter().map(|task| task.1).collect()),
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
    let at = |percent: usize| millis.get(millis.len() * percent / 100).or(millis.last()).copied().unwrap_or_default();
    format!("{:.1}, {:.1}, {:.1} ms", at(50), at(95), at(100))
}
