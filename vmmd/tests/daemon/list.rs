//! `ListVms`: filters, fields and pages.

use std::collections::BTreeMap;

use tonic::{Code, Status};
use vmmd_api::v1::{ListVmsRequest, ListVmsResponse, VmFilter, VmPhase};

use crate::{harness::Daemon, verbs::fields};

impl Daemon {
    pub async fn create_labelled(&self, name: &str, label: &str) {
        let mut vm = self.manifest(name, "");
        let labels = BTreeMap::from([("tier".to_owned(), label.to_owned())]);
        vm.metadata.as_mut().unwrap().labels = labels;
        self.create(vm).await.unwrap();
    }

    async fn list_by(&self, request: ListVmsRequest) -> Result<ListVmsResponse, Status> {
        Ok(self.client().list_vms(request).await?.into_inner())
    }
}

fn names(response: &ListVmsResponse) -> Vec<String> {
    let names = response.vms.iter().map(|vm| vm.metadata.clone().unwrap().name);
    names.collect()
}

#[tokio::test]
async fn list_has_the_vms_of_the_filter_and_the_requested_fields() {
    let daemon = Daemon::start().await;
    for (name, label) in [("b", "web"), ("a", "web"), ("c", "db")] {
        daemon.create_labelled(name, label).await;
    }
    daemon.start_vm("a").await.unwrap();
    for (labels, phases, named, expected) in [
        (&[][..], &[][..], &[][..], "abc"),
        (&["tier=web"], &[], &[], "ab"),
        (&["tier!=web"], &[], &[], "c"),
        (&["tier"], &[VmPhase::Running], &[], "a"),
        (&[], &[VmPhase::Stopped, VmPhase::Failed], &["a", "c", "x"], "c"),
    ] {
        let filter = VmFilter {
            labels: labels.iter().map(|label: &&str| (*label).into()).collect(),
            phases: phases.iter().map(|phase: &VmPhase| (*phase).into()).collect(),
            names: named.iter().map(|name: &&str| (*name).into()).collect(),
        };
        let request = ListVmsRequest {
            filter: Some(filter),
            fields: vec!["status.phase".into()],
            ..Default::default()
        };
        let listed = daemon.list_by(request).await.unwrap();
        assert_eq!(
            names(&listed).concat(),
            expected,
            "{labels:?} {phases:?} {named:?}"
        );
        for vm in listed.vms {
            assert!(vm.spec.is_none() && vm.metadata.unwrap().uid.is_empty());
            let status = vm.status.unwrap();
            assert!(status.phase() != VmPhase::Unspecified && status.conditions.is_empty());
        }
    }
}

#[tokio::test]
async fn pages_are_consistent_while_vms_and_daemons_change() {
    let mut daemon = Daemon::start().await;
    for name in ["a", "c", "e", "g"] {
        daemon.create(daemon.manifest(name, "")).await.unwrap();
    }
    let mut request = ListVmsRequest {
        page_size: 2,
        ..Default::default()
    };
    let first = daemon.list_by(request.clone()).await.unwrap();
    assert_eq!(names(&first), ["a", "c"]);
    daemon.delete("c", false).await.unwrap();
    daemon.create(daemon.manifest("b", "")).await.unwrap();
    daemon.create(daemon.manifest("d", "")).await.unwrap();
    daemon.kill_and_restart().await;
    request.page_token = first.next_page_token;
    let second = daemon.list_by(request.clone()).await.unwrap();
    assert_eq!(names(&second), ["d", "e"]);
    assert_eq!(
        second.cursor, first.cursor,
        "a watch from there tells what the pages missed"
    );
    request.page_token = second.next_page_token;
    let third = daemon.list_by(request.clone()).await.unwrap();
    assert_eq!(
        (names(&third), third.next_page_token.as_str()),
        (vec!["g".to_owned()], "")
    );
}

#[tokio::test]
async fn what_is_wrong_in_a_list_is_named() {
    let daemon = Daemon::start().await;
    for name in ["a", "b"] {
        daemon.create(daemon.manifest(name, "")).await.unwrap();
    }
    let one = ListVmsRequest {
        page_size: 1,
        ..Default::default()
    };
    let token = daemon.list_by(one).await.unwrap().next_page_token;
    let filter = |label: &str| VmFilter {
        labels: vec![label.to_owned()],
        ..Default::default()
    };
    let base = ListVmsRequest::default;
    for (field, request) in [
        (
            "pageSize",
            ListVmsRequest {
                page_size: 1001,
                ..base()
            },
        ),
        (
            "pageToken",
            ListVmsRequest {
                page_token: "x".into(),
                ..base()
            },
        ),
        (
            "pageToken",
            ListVmsRequest {
                page_token: token,
                filter: Some(filter("tier")),
                ..base()
            },
        ),
        (
            "fields[0]",
            ListVmsRequest {
                fields: vec!["status.phases".into()],
                ..base()
            },
        ),
        (
            "filter.labels[0]",
            ListVmsRequest {
                filter: Some(filter("=")),
                ..base()
            },
        ),
    ] {
        let failure = daemon.list_by(request).await.unwrap_err();
        assert_eq!(failure.code(), Code::InvalidArgument, "{field}");
        assert_eq!(fields(&failure), [field]);
    }
}
