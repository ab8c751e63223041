//! The flags that select and order flows, shared by `kpx flows` and `kubectl kpx flows`.

use std::net::IpAddr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use comfy_table::Cell;

use crate::object_name::ServiceName;
use crate::output::{cell, green, yellow};
use crate::{FlowView, STATES};

#[derive(Args, Debug)]
pub struct FlowArgs {
    /// Only flows of this Service.
    #[arg(long, value_name = "[svc/][NAMESPACE/]NAME")]
    pub service: Option<ServiceName>,
    /// Show only flows in these states.
    #[arg(long, value_parser = states(), value_delimiter = ',', value_name = "STATE,…")]
    state: Vec<String>,
    /// Only flows of this client.
    #[arg(long, value_name = "IP")]
    pub client: Option<IpAddr>,
    /// Only flows to this backend.
    #[arg(long, value_name = "IP")]
    pub backend: Option<IpAddr>,
    /// Maximum number of flows per node, most recently active first; 0: all.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    limit: usize,
    /// The column to sort by.
    #[arg(long, value_enum, default_value_t, value_name = "COLUMN")]
    sort_by: FlowOrder,
}

/// The order of flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum FlowOrder {
    /// Most recently active first.
    #[default]
    Idle,
    Client,
    Service,
    Backend,
    State,
}

impl FlowArgs {
    /// Returns the maximum number of flows per node; `usize::MAX` for `--limit 0`.
    pub const fn limit(&self) -> usize {
        if self.limit == 0 {
            usize::MAX
        } else {
            self.limit
        }
    }

    /// Returns the arguments that select the same flows on a node. The plugin sorts by itself.
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![format!("--limit={}", self.limit)];
        arguments.extend(
            self.service
                .iter()
                .map(|ServiceName(name)| format!("--service={name}")),
        );
        arguments.extend(self.state.iter().map(|state| format!("--state={state}")));
        arguments.extend(
            self.client
                .iter()
                .map(|client| format!("--client={client}")),
        );
        arguments.extend(
            self.backend
                .iter()
                .map(|backend| format!("--backend={backend}")),
        );
        arguments
    }

    /// Returns the selected states, comma-separated; `None` for all.
    pub fn states(&self) -> Option<String> {
        (!self.state.is_empty()).then(|| self.state.join(","))
    }

    pub fn has_state(&self, flow: &FlowView) -> bool {
        self.state.is_empty() || self.state.contains(&flow.state)
    }

    /// Sorts the flows; the sort is stable.
    pub fn sort<T>(&self, flows: &mut [T], flow: impl Fn(&T) -> &FlowView) {
        match self.sort_by {
            FlowOrder::Idle => flows.sort_by_key(|one| flow(one).idle_secs),
            FlowOrder::Client => flows.sort_by_key(|one| flow(one).client),
            FlowOrder::Service => flows.sort_by_cached_key(|one| flow(one).service_name()),
            FlowOrder::Backend => flows.sort_by_key(|one| flow(one).backend),
            FlowOrder::State => {
                flows.sort_by_key(|one| STATES.iter().position(|state| *state == flow(one).state));
            }
        }
    }
}

/// The state `halfClosed` and its kebab-case alias.
const HALF_CLOSED: [&str; 2] = ["halfClosed", "half-closed"];

fn states() -> impl TypedValueParser<Value = String> {
    let [name, alias] = HALF_CLOSED;
    let values = STATES.map(|state| {
        let value = PossibleValue::new(state);
        if state == name {
            value.alias(alias)
        } else {
            value
        }
    });
    PossibleValuesParser::new(values).map(
        move |word| {
            if word == alias { name.to_owned() } else { word }
        },
    )
}

pub fn state_cell(flow: &FlowView) -> Cell {
    match flow.state.as_str() {
        "established" => green("established"),
        "reset" => yellow("reset"),
        state => cell(state),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flows: FlowArgs,
    }

    fn read(words: &[String]) -> FlowArgs {
        Line::parse_from(std::iter::once("kpx".to_owned()).chain(words.iter().cloned())).flows
    }

    #[test]
    fn node_gets_the_selection_and_not_the_order() {
        let words = [
            "--limit=7",
            "--service=shop/web",
            "--state=new",
            "--state=reset",
            "--client=fd00::1",
        ];
        let words = words.map(str::to_owned);
        let args = read(&[&words[..], &["--sort-by=client".to_owned()]].concat());
        assert_eq!(args.arguments(), words);
        assert_eq!(read(&[]).arguments(), ["--limit=1000"]);
        let states = read(&["--state=half-closed,halfClosed,new".to_owned()]).states();
        assert_eq!(states.as_deref(), Some("halfClosed,halfClosed,new"));
        assert_eq!(read(&["--limit=0".to_owned()]).limit(), usize::MAX);
    }

    #[test]
    fn column_orders_flows() {
        let flow = |idle_secs, client: [u8; 4], state: &str| FlowView {
            protocol: "TCP".into(),
            client: (client, 40_000).into(),
            frontend: ([10, 96, 0, 10], 80).into(),
            backend: ([10, 2, 0, 1], 8080).into(),
            source: (client, 40_000).into(),
            masqueraded: false,
            from_node: false,
            state: state.into(),
            idle_secs,
            timeout_secs: 30,
            service: None,
        };
        let all = [
            flow(3, [10, 0, 0, 2], "closed"),
            flow(1, [10, 0, 0, 9], "established"),
            flow(2, [10, 0, 0, 1], "new"),
        ];
        let sorted = |column: &str| {
            let mut flows = all.clone();
            read(&[format!("--sort-by={column}")]).sort(&mut flows, |flow| flow);
            flows.map(|flow| flow.idle_secs)
        };
        assert_eq!(
            [sorted("idle"), sorted("client"), sorted("state")],
            [[1, 2, 3], [2, 3, 1], [2, 1, 3]]
        );
    }
}
