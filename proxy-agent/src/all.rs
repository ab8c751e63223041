//! Runs independent attempts, and reports all failures.

use anyhow::{Result, anyhow};

/// Joins results into one, whose error lists all failures.
pub(crate) fn all<const N: usize>(results: [Result<()>; N]) -> Result<()> {
    let mut failed: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    match failed.len() {
        0 => Ok(()),
        1 => Err(failed.remove(0)),
        _ => {
            let reasons: Vec<_> = failed.iter().map(|error| format!("{error:#}")).collect();
            Err(anyhow!(reasons.join("; ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_every_failed_attempt() {
        assert!(all([Ok(()), Ok(())]).is_ok());
        let text = |results| format!("{:#}", all(results).unwrap_err());
        assert_eq!(
            text([Ok(()), Err(anyhow!("no route").context("ask"))]),
            "ask: no route"
        );
        assert_eq!(
            text([
                Err(anyhow!("no route").context("ask")),
                Err(anyhow!("no room"))
            ]),
            "ask: no route; no room"
        );
    }
}
