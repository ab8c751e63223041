//! The hand-over of external clients: see [`crate::model::AbleNodes`].

use std::sync::Arc;

use super::Desired;
use crate::model::AbleNodes;

impl Desired {
    /// Replaces the nodes that take over packets of external clients. Returns true after a change.
    pub fn set_able_nodes(&mut self, able: AbleNodes) -> bool {
        let is_change = *self.options.able != able;
        if is_change {
            self.options.able = Arc::new(able);
            self.rebuild_node();
        }
        is_change
    }
}
