//! The flags that select the Services of a command. kubectl's flags of these names select kpx's
//! pods here.

use anyhow::{Result, ensure};
use clap::Args;
use proxy_view::object_name::ServiceName;
use proxy_view::output::nothing;
use proxy_view::{Selector, ServiceView};

#[derive(Args, Debug)]
pub(crate) struct SelectArgs {
    /// Show only this Service; add NAMESPACE/ if several Services share the name.
    #[arg(value_name = "[svc/][NAMESPACE/]NAME")]
    pub(crate) service: Option<ServiceName>,
    /// Show only Services of this namespace.
    #[arg(long, value_name = "NAMESPACE")]
    service_namespace: Option<String>,
    /// Show only Services with these labels, as in kubectl: app=web,tier!=db,env in (a,b),!old.
    #[arg(long, value_name = "LABELS", conflicts_with = "service")]
    service_selector: Option<Selector>,
}

impl SelectArgs {
    /// Returns the message for an empty list.
    pub(crate) fn nothing(&self, objects: &str) -> String {
        nothing(objects, self.service_namespace.as_deref())
    }

    /// Returns the arguments of a kpx command that selects the same Services on a node. The
    /// Service's name is omitted, because kpx fails on each node without the Service.
    pub(crate) fn arguments(&self, command: &str) -> Vec<String> {
        let mut arguments = vec![command.to_owned()];
        arguments.extend(in_namespace(&self.service_namespace));
        arguments.extend(
            self.service_selector
                .iter()
                .map(|selector| format!("--selector={selector}")),
        );
        arguments
    }

    /// Returns true for the named Service; for every Service if none is named.
    pub(crate) fn names(&self, namespace: &str, service: &str) -> bool {
        self.service
            .as_ref()
            .is_none_or(|name| name.matches(namespace, service))
    }

    /// Fails if no node has the named Service. Each node has all Services.
    pub(crate) fn check<'a>(&self, known: impl Iterator<Item = &'a ServiceView>) -> Result<()> {
        let Some(name) = &self.service else {
            return Ok(());
        };
        let known: Vec<_> = known.cloned().collect();
        let is_known = known.iter().any(|service| name.is(service));
        ensure!(known.is_empty() || is_known, name.unknown(&known));
        Ok(())
    }
}

/// Returns kpx's argument for the namespace of the Services.
pub(crate) fn in_namespace(namespace: &Option<String>) -> Option<String> {
    namespace
        .as_ref()
        .map(|namespace| format!("--namespace={namespace}"))
}

/// Formats nodes for a narrow column: `n1`, `all 3`, `n1,n2` or `n1 and 2 more`.
pub(crate) fn nodes(nodes: &[&str], all: usize) -> String {
    match nodes {
        [one] => (*one).to_owned(),
        nodes if nodes.len() == all => format!("all {all}"),
        [one, two] => format!("{one},{two}"),
        [one, rest @ ..] => format!("{one} and {} more", rest.len()),
        [] => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_of_nodes_stays_narrow() {
        let texts = [
            nodes(&["n1"], 2),
            nodes(&["n1", "n2"], 2),
            nodes(&["a", "b"], 3),
            nodes(&["a", "b", "c"], 4),
        ];
        assert_eq!(texts, ["n1", "all 2", "a,b", "a and 2 more"]);
    }
}
