//! Attempts that do not depend on each other: each is made, and all that fail are told.

use anyhow::{Result, anyhow};

/// Puts the results of several attempts into one; its error names the reasons of all that failed.
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
