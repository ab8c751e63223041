//! Prints what the agent can reach: the API server, and the backends in host mode.

use comfy_table::Cell;

use crate::age;
use crate::output::{Form, cell, yellow};
use crate::status::{
    CutOffPortStatus, CutOffStatus, ProblemStatus, UnheardStatus, UnreachableStatus,
};

/// Returns the API server's URL and, if a watch fails, the beginning and cause.
pub fn api_server(url: &str, unheard: Option<&UnheardStatus>, problems: &[ProblemStatus]) -> Cell {
    let Some(UnheardStatus { since, .. }) = unheard else {
        return cell(url);
    };
    let is_first =
        |problem: &&ProblemStatus| problem.what.ends_with(" watch") && problem.since == *since;
    let why = problems
        .iter()
        .find(is_first)
        .map(|problem| format!(": {}", problem.why))
        .unwrap_or_default();
    yellow(format!(
        "{url}; for {} a watch there fails{why}",
        age::since(*since)
    ))
}

/// The maximum number of Services listed without `--output wide`. On an overlay network, thousands
/// of Services are out of reach.
const FEW: usize = 5;

/// Lists what a host in host mode does not reach: whole Services, then ports or address families of
/// other Services. Wide output lists each backend.
pub fn out_of_reach(
    services: &[CutOffStatus],
    ports: &[CutOffPortStatus],
    backends: &[UnreachableStatus],
    form: Form,
) -> String {
    let most = if form.wide { usize::MAX } else { FEW };
    let whole = services
        .iter()
        .take(most)
        .map(|one| vec![cell(&one.service), cell(&one.why)]);
    let parts = ports.iter().take(most).map(|one| {
        let CutOffPortStatus {
            service,
            port,
            family,
            why,
        } = one;
        vec![cell(format!("{service} {port} over {family}")), cell(why)]
    });
    let mut text = form.sentences(&["OUT OF REACH", "WHY"], whole.chain(parts));
    for (all, what) in [
        (services.len(), "Services"),
        (ports.len(), "ports of other Services"),
    ] {
        if all > most {
            text += &format!(
                "and {} more {what}: kpx status -o wide lists them\n",
                all - most
            );
        }
    }
    let backends = backends.iter().filter(|_| form.wide).map(|unreachable| {
        let UnreachableStatus {
            service,
            port,
            backend,
            why,
        } = unreachable;
        vec![cell(backend), cell(format!("{service} {port}")), cell(why)]
    });
    let backends = form.sentences(&["BACKEND", "OF", "OUT OF REACH BECAUSE"], backends);
    if backends.is_empty() || text.is_empty() {
        text + &backends
    } else {
        format!("{text}\n{backends}")
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    #[test]
    fn port_out_of_reach_is_listed_without_wide_output() {
        let port = |number: usize| CutOffPortStatus {
            service: "shop/web".to_owned(),
            port: format!("{number}/udp"),
            family: "IPv6".to_owned(),
            why: "no route".to_owned(),
        };
        let form = Form {
            headers: true,
            ..Form::default()
        };
        let ports: Vec<_> = (1..=FEW + 2).map(port).collect();
        let text = out_of_reach(&[], &ports[..1], &[], form);
        let expected = "OUT OF REACH               WHY\nshop/web 1/udp over IPv6   no route\n";
        assert_eq!(text, expected);
        let text = out_of_reach(&[], &ports, &[], form);
        assert_eq!(text.lines().count(), 1 + FEW + 1);
        assert!(
            text.ends_with("and 2 more ports of other Services: kpx status -o wide lists them\n"),
            "{text}"
        );
        let all = out_of_reach(&[], &ports, &[], Form { wide: true, ..form });
        assert_eq!(all.lines().count(), 1 + FEW + 2);
    }

    #[test]
    fn api_server_is_named_with_the_time_and_cause_of_its_silence() {
        let since = Timestamp::UNIX_EPOCH;
        let problem = |what: &str, why: &str| ProblemStatus {
            what: what.to_owned(),
            why: why.to_owned(),
            since,
        };
        let url = "https://10.0.0.1:6443";
        assert_eq!(api_server(url, None, &[]).content(), url);
        let problems = [
            problem("maps", "full"),
            problem("Service watch", "connection refused"),
        ];
        let unheard = UnheardStatus {
            since,
            kinds: vec!["Service".to_owned()],
        };
        let text = api_server(url, Some(&unheard), &problems).content();
        assert!(text.starts_with("https://10.0.0.1:6443; for "), "{text}");
        assert!(
            text.ends_with(" a watch there fails: connection refused"),
            "{text}"
        );
    }
}
