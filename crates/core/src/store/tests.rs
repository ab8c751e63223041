use super::*;
use crate::builders::{names, service, slice};

fn dirty(store: &mut Store, input: impl Into<Input>) -> Vec<String> {
    let (Dirty::Services {
        services: dirty, ..
    }
    | Dirty::Endpoints {
        services: dirty, ..
    }) = store.apply(input.into())
    else {
        panic!("not of Services")
    };
    dirty.iter().map(ObjectName::to_string).collect()
}

#[test]
fn an_input_dirties_the_changed_services() {
    let mut store = Store::new("here");
    let web = || {
        slice("web-1", "web")
            .port("", "TCP", 80)
            .ready("10.244.0.5")
    };
    assert_eq!(
        dirty(&mut store, web()),
        ["default/web"],
        "a slice may come before its Service"
    );
    assert_eq!(dirty(&mut store, service("web")), ["default/web"]);
    assert_eq!(dirty(&mut store, web()), [""; 0], "seen before");
    assert_eq!(
        dirty(&mut store, web().ready("10.244.0.6")),
        ["default/web"]
    );
    let other = slice("web-1", "other").port("", "TCP", 80);
    assert_eq!(
        dirty(&mut store, other.clone()),
        ["default/other", "default/web"],
        "label changed"
    );
    assert_eq!(
        store.slices_of(&ObjectName::new("default", "web")).count(),
        0
    );
    assert_eq!(
        dirty(&mut store, other.clone().without_service()),
        ["default/other"],
        "label removed"
    );
    assert_eq!(dirty(&mut store, other.clone().without_service()), [""; 0]);
    assert_eq!(
        dirty(&mut store, other.clone()),
        ["default/other"],
        "label added"
    );
    assert_eq!(dirty(&mut store, other.deleted()), ["default/other"]);
    assert_eq!(dirty(&mut store, other.deleted()), [""; 0], "gone before");
}

#[test]
fn a_list_dirties_only_the_differences() {
    let mut store = Store::new("here");
    let list = |objects: Vec<_>| Input::Service(Update::All(objects));
    let web = service("web").cluster_ip("10.96.0.1");
    assert_eq!(
        dirty(
            &mut store,
            list(vec![
                web.object(),
                service("old").object(),
                service("same").object()
            ])
        ),
        names(["old", "same", "web"])
    );
    let relisted = vec![
        web.cluster_ip("10.96.0.2").object(),
        service("same").object(),
        service("new").object(),
    ];
    assert_eq!(
        dirty(&mut store, list(relisted)),
        names(["new", "old", "web"])
    );
}

#[test]
fn a_store_is_complete_once_every_kind_was_listed() {
    let mut store = Store::new("here");
    let lists = [
        Input::Service(Update::All(vec![])),
        Input::EndpointSlice(Update::All(vec![])),
        Input::Node(Update::All(vec![])),
        Input::ServiceCidr(Update::All(vec![])),
    ];
    let _ = store.apply(service("web").into());
    for list in lists {
        assert!(!store.is_complete());
        let _ = store.apply(list);
    }
    assert!(store.is_complete());
}
